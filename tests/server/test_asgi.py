"""Bodies, answers and connections without a network."""

from __future__ import annotations

import asyncio
import json

import pytest

from herald_jax.server.asgi import ClientGone, Reply, read_body, while_connected
from herald_jax.server.errors import ApiError, as_api_error


def receiver(*messages, then: float | None = None):
    """Gives these messages, and then waits or says that the client has gone."""
    left = list(messages)

    async def receive():
        if left:
            return left.pop(0)
        await asyncio.sleep(3600 if then is None else then)
        return {"type": "http.disconnect"}

    return receive


def scope(**headers):
    pairs = {"content-type": "application/json; charset=utf-8", **headers}
    return {
        "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in pairs.items()],
    }


def body(piece: bytes, more: bool = False):
    return {"type": "http.request", "body": piece, "more_body": more}


def test_bodies_are_put_together_and_limited():
    def read(*messages, limit=10, **headers):
        receive = receiver(*messages, then=0)
        return asyncio.run(read_body(scope(**headers), receive, limit=limit, seconds=5))

    assert read(body(b"abc", True), body(b"de")) == b"abcde"
    assert read(body(b"x" * 10)) == b"x" * 10
    for messages, headers in (
        ([body(b"x" * 11)], {}),
        ([body(b"x" * 6, True), body(b"x" * 6)], {}),
        ([body(b"x" * 200, True)], {}),
        ([], {"content_length": "1000000"}),
    ):
        with pytest.raises(ApiError) as info:
            read(*messages, **headers)
        assert info.value.status == 413
    with pytest.raises(ClientGone):
        read(body(b"x", True))
    with pytest.raises(ApiError) as info:
        read(body(b"{}"), content_type="text/plain")
    assert info.value.status == 415


def test_work_is_cancelled_when_the_client_goes():
    async def main():
        ended = []

        async def work(seconds):
            try:
                await asyncio.sleep(seconds)
            finally:
                ended.append(seconds)

        with pytest.raises(ClientGone):
            await while_connected(receiver(then=0.01), work(100))
        assert ended == [100]
        await while_connected(receiver(), work(0))

        async def fail():
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await while_connected(receiver(), fail())
        outer = asyncio.ensure_future(while_connected(receiver(), work(200)))
        await asyncio.sleep(0.01)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer
        assert ended == [100, 0, 200]

    asyncio.run(main())


def test_a_client_that_takes_nothing_counts_as_gone():
    async def stuck(message):
        await asyncio.sleep(3600)

    async def broken(message):
        raise ConnectionResetError

    for send in (stuck, broken):
        with pytest.raises(ClientGone):
            asyncio.run(Reply(send, 0.05).json(200, {}))


def test_answers():
    sent = []

    async def send(message):
        sent.append(message)

    reply = Reply(send, 1.0)
    asyncio.run(reply.json(418, {"a": "ü"}, {"x-y": "z"}))
    assert reply.status == sent[0]["status"] == 418
    assert dict(sent[0]["headers"])[b"x-y"] == b"z"
    assert json.loads(sent[1]["body"]) == {"a": "ü"}
    assert int(dict(sent[0]["headers"])[b"content-length"]) == len(sent[1]["body"])


def test_what_an_unknown_error_says_is_not_told():
    api = as_api_error(KeyError("a secret"))
    assert api.status == 500 and "secret" not in json.dumps(api.body())
    assert len(ApiError(400, "x" * 5000).message) < 1010

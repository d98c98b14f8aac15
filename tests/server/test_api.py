"""The server over HTTP on the loopback device, with OpenAI's own client where it can say it."""

from __future__ import annotations

import json
import threading
import time

import httpx
import pytest
from serving import EOS, TOKENIZER, live_server, reply, wait_until

pytest.importorskip("fastapi", reason="needs the extra `serve`")
openai = pytest.importorskip("openai", reason="needs the extra `test`")
parser = pytest.importorskip("prometheus_client.parser", reason="needs the extra `serve`")

KEY = "a-key-of-more-than-sixteen-characters"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
RENDERED = "[system]Be brief.[user]Why?[assistant]"


@pytest.fixture(scope="module")
def live():
    with live_server() as (server, _):
        yield server


@pytest.fixture(scope="module")
def client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(live):
    with live.client() as client:
        yield client


def post(http: httpx.Client, path: str = "completions", **fields) -> httpx.Response:
    body = {"model": "tiny", **({"messages": CHAT} if path != "completions" else {}), **fields}
    return http.post(f"/v1/{path}", json=body)


def test_completion(client):
    answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=40)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (reply("Hello"), "stop", 0)
    assert answer.object == "text_completion" and answer.model == "tiny"
    usage = answer.usage
    assert usage.prompt_tokens == 5 and usage.completion_tokens == len(reply("Hello")) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    extra = usage.model_extra
    assert extra["forwards"] == extra["denoising_steps"] + extra["blocks"] > 2
    short = client.completions.create(model="tiny", prompt="Hello", max_tokens=3)
    assert (short.choices[0].text, short.choices[0].finish_reason) == ("<hE", "length")


def test_prompts_may_be_lists_of_texts_or_ids(client):
    answer = client.completions.create(model="tiny", prompt=["One", "Two ✓"], n=2)
    texts = [choice.text for choice in answer.choices]
    assert texts == [reply("One")] * 2 + [reply("Two ✓")] * 2
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 3 + 7
    ids = TOKENIZER.encode("Ids")
    extra = {"return_token_ids": True}
    answer = client.completions.create(model="tiny", prompt=ids, extra_body=extra)
    assert answer.choices[0].text == reply("Ids")
    assert answer.choices[0].model_extra["token_ids"] == [*TOKENIZER.encode(reply("Ids")), EOS]
    answer = client.completions.create(model="tiny", prompt=[ids, ids])
    assert [choice.text for choice in answer.choices] == [reply("Ids")] * 2


def test_chat(client):
    answer = client.chat.completions.create(model="tiny", messages=CHAT, max_completion_tokens=90)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content == reply(RENDERED)
    assert (answer.object, choice.finish_reason) == ("chat.completion", "stop")
    assert isinstance(answer.usage, openai.types.CompletionUsage)
    parts = [{"type": "text", "text": "W"}, {"type": "text", "text": "hy?"}]
    again = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    answer = client.chat.completions.create(model="tiny", messages=again)
    assert answer.choices[0].message.content == reply(RENDERED)


@pytest.mark.parametrize("n", [1, 2])
def test_streams_join_to_the_whole_text(client, n):
    prompts = ["Grüße ✓✓", "another one"]
    options = dict(model="tiny", prompt=prompts, n=n, stop=["NO"], stream=True)
    texts, reasons = [""] * 2 * n, {}
    stream = client.completions.create(**options, stream_options={"include_usage": True})
    chunks = list(stream)
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        assert chunk.usage is None and choice.index not in reasons
        if choice.finish_reason is not None:
            reasons[choice.index] = choice.finish_reason
    whole = client.completions.create(**{**options, "stream": False})
    assert texts == [choice.text for choice in whole.choices]
    assert texts[n:] == ["<A"] * n
    assert reasons == {choice.index: "stop" for choice in whole.choices}
    assert whole.choices[n].model_extra["stop_reason"] == "NO"
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_streams(client):
    stream = client.chat.completions.create(model="tiny", messages=CHAT, stream=True, seed=3)
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == reply(RENDERED)
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len(chunks) > 4 and all(chunk.usage is None for chunk in chunks)


def test_events_are_framed_and_ended(http):
    with http.stream(
        "POST", "/v1/completions", json=dict(model="tiny", prompt="x", stream=True)
    ) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        text = answer.read().decode()
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: ")) for event in events[:-2])


def test_own_options_reach_the_engine(client, live):
    extra = dict(strategy="sequential", denoising_steps=2, top_k=5, ignore_eos=True, priority=7)
    answer = client.completions.create(
        model="tiny", prompt="q", max_tokens=11, temperature=0.5, top_p=0.9, extra_body=extra
    )
    assert answer.usage.completion_tokens == 11
    sampling = live.llm.engine._runner.rows[-1].sampling
    assert (sampling.strategy, sampling.denoising_steps, sampling.top_k) == ("sequential", 2, 5)
    assert (sampling.temperature, sampling.top_p, sampling.ignore_eos) == (0.5, 0.9, True)
    stop = TOKENIZER.encode("Q")
    answer = client.completions.create(
        model="tiny", prompt="q", extra_body={"stop_token_ids": stop}
    )
    assert answer.choices[0].text == "<" and answer.choices[0].model_extra["stop_reason"] == stop[0]


REFUSED = [
    ("completions", {"logit_bias": {"5": 1}}, "logit_bias"),
    ("completions", {"logprobs": 1}, "logprobs"),
    ("completions", {"logprobs": 0}, "logprobs"),
    ("completions", {"echo": True}, "echo"),
    ("completions", {"suffix": "x"}, "suffix"),
    ("completions", {"best_of": 2}, "best_of"),
    ("completions", {"frequency_penalty": 0.5}, "frequency_penalty"),
    ("completions", {"tmperature": 0.5}, "tmperature"),
    ("completions", {"messages": CHAT}, "messages"),
    ("completions", {"prompt": None}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": ["a", 1]}, "prompt"),
    ("completions", {"prompt": [1, True]}, "prompt"),
    ("completions", {"prompt": [5, 99999]}, "prompt_token_ids"),
    ("completions", {"prompt": "x" * 600}, "prompt"),
    ("completions", {"prompt": ["x"] * 65}, "prompt"),
    ("completions", {"n": 65}, "n"),
    ("completions", {"n": 0}, "n"),
    ("completions", {"max_tokens": 0}, "max_tokens"),
    ("completions", {"max_tokens": 512}, "max_tokens"),
    ("completions", {"temperature": "hot"}, "temperature"),
    ("completions", {"temperature": -1}, "temperature"),
    ("completions", {"top_p": 0}, "top_p"),
    ("completions", {"stop": [""]}, "stop"),
    ("completions", {"strategy": "magic"}, "strategy"),
    ("completions", {"denoising_steps": 5}, "denoising_steps"),
    ("completions", {"threshold": 2}, "threshold"),
    ("completions", {"priority": -1}, "priority"),
    ("completions", {"priority": 101}, "priority"),
    ("completions", {"priority": True}, "priority"),
    ("completions", {"stream": "yes"}, "stream"),
    ("completions", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("completions", {"stream": True, "stream_options": {"other": 1}}, "stream_options"),
    ("completions", {"user": 5}, "user"),
    ("chat/completions", {"tools": [{"type": "function"}]}, "tools"),
    ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
    ("chat/completions", {"logprobs": True}, "logprobs"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("chat/completions", {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
    ),
]


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(http, path, fields, param):
    if path == "completions":
        fields = {"prompt": "x", **fields}
    answer = post(http, path, **fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and error["code"] and param.split(".")[0] in error["message"]
    assert len(error["message"]) < 1100


def test_fields_that_ask_for_nothing_are_taken(http):
    answer = post(http, prompt="x", logit_bias={}, suffix=None, echo=False, best_of=1, user="u",
                  presence_penalty=0, logprobs=None, seed=None, stream_options=None)  # fmt: skip
    assert answer.status_code == 200, answer.text
    answer = post(http, "chat/completions", tools=[], tool_choice="none", logprobs=False,
                  response_format={"type": "text"}, top_logprobs=None)  # fmt: skip
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"[" * 100_000, b'{"model": "tiny", "model": "tiny"}', b"\xff\xfe{}", b"5"],
)
def test_bodies_that_are_not_json_objects(http, body):
    headers = {"content-type": "application/json"}
    answer = http.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"


def test_errors_of_the_clients_own_kinds(client, http):
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        client.completions.create(model="tiny", prompt="x", logit_bias={"1": 2})
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    assert http.post("/v1/completions", content=b"{}").status_code == 415
    assert http.get("/v1/completions").status_code == 405
    answer = http.get("/nothing")
    assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"


def test_another_host_name_is_refused_without_a_key(http):
    answer = http.get("/v1/models", headers={"host": "evil.example"})
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "host_not_allowed"
    for name in ("localhost:1", "127.0.0.1", "[::1]:8000", "LOCALHOST"):
        assert http.get("/v1/models", headers={"host": name}).status_code == 200


def metrics(http: httpx.Client) -> dict[tuple, float]:
    text = http.get("/metrics").text
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_move(http):
    before = metrics(http)
    assert post(http, prompt="metrics", n=2).status_code == 200
    post(http, prompt="x", n=0)
    wait_until(lambda: metrics(http)["herald_pending_steps",] == 0)
    after = metrics(http)

    def moved(name: str, *labels) -> float:
        return after[name, *labels] - before.get((name, *labels), 0.0)

    tokens = 2 * (len(reply("metrics")) + 1)
    assert moved("herald_requests_total") == 1
    assert moved("herald_generated_tokens_total") == tokens
    assert moved("herald_prompt_tokens_total") == 7
    assert moved("herald_samples_total", ("reason", "stop")) == 2
    blocks = moved("herald_blocks_total")
    forwards = moved("herald_forwards_total")
    assert forwards == moved("herald_denoising_steps_total") + blocks
    assert moved("herald_row_steps_total") >= forwards
    assert after["herald_bubble_row_steps",] >= 0
    assert moved("herald_block_seconds_count") == moved("herald_block_steps_count") == blocks
    assert moved("herald_time_to_first_block_seconds_count") == 2
    for quantile in ("0.5", "0.95", "0.99"):
        assert after["herald_block_seconds_recent", ("quantile", quantile)] > 0
    status = (("route", "completions"), ("status", "200"))
    assert moved("herald_http_answers_total", *status) == 1
    assert moved("herald_http_refusals_total", ("code", "invalid_value")) == 1
    assert after["herald_rows", ("state", "free")] == 4
    assert after["herald_kv_pages_used",] == after["herald_waiting_samples",] == 0
    assert after["herald_kv_device_bytes",] > 0 and after["process_resident_memory_bytes",] > 0
    assert after["herald_tokens_per_second",] > 0


def test_api_key():
    with live_server(api_key=KEY) as (server, _), server.client() as http:
        assert http.get("/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"},
                        {"authorization": KEY}, {"authorization": f"Bearer {KEY}x"}):  # fmt: skip
            for path in ("/metrics", "/v1/models", "/nothing"):
                answer = http.get(path, headers=headers)
                assert answer.status_code == 401 and KEY not in answer.text
                assert answer.headers["www-authenticate"] == "Bearer"
        right = {"authorization": f"Bearer {KEY}", "host": "some.name"}
        assert http.get("/v1/models", headers=right).status_code == 200
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="no" * 10) as client:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
            assert client.completions.create(model="tiny", prompt="x").choices[0].text == "<X>"


def test_large_and_slow_bodies():
    limits = dict(max_body_bytes=1000, read_seconds=0.7, max_prompt_tokens=20, default_max_tokens=5)
    with live_server(limits=limits) as (server, _), server.client() as http:
        assert post(http, prompt="x" * 2000).status_code == 413
        pieces = (b'{"model": "' + b"x" * 300 for _ in range(5))
        headers = {"content-type": "application/json"}
        answer = http.post("/v1/completions", content=pieces, headers=headers)
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
        with http.stream(
            "POST", "/v1/completions", content=b"x" * 100_000, headers=headers
        ) as answer:
            assert answer.status_code == 413

        def slow():
            yield b"{"
            time.sleep(1.5)
            yield b"}"

        assert http.post("/v1/completions", content=slow(), headers=headers).status_code == 408
        answer = post(http, prompt="x" * 21)
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert post(http, prompt="x" * 20).json()["usage"]["completion_tokens"] == 5


def test_too_many_requests_and_a_full_queue():
    limits, engine = dict(max_concurrent=3), dict(max_num_seqs=1, max_waiting=2)
    with live_server(limits=limits, engine=engine) as (server, runner), server.client() as http:
        runner.may_go.clear()
        answers = []

        def ask(text, **fields):
            thread = threading.Thread(
                target=lambda: answers.append(post(http, prompt=text, **fields))
            )
            thread.start()
            return thread

        first = ask("first")
        assert runner.is_stopped.wait(10)
        threads = [first, ask("second", n=2), ask("third")]
        wait_until(lambda: server.service.active == 3)
        answer = post(http, prompt="fourth")
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"] == {
            "message": "3 requests are being answered, which is the limit. Try again later.",
            "type": "rate_limit_error", "param": None, "code": "too_many_requests",
        }  # fmt: skip
        wait_until(lambda: len(server.llm._thread._commands) == 2)
        runner.may_go.set()
        for thread in threads:
            thread.join(20)
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429]
        (refused,) = (answer for answer in answers if answer.status_code == 429)
        assert refused.json()["error"]["code"] == "queue_full" and refused.headers["retry-after"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_aborts(stream):
    with live_server() as (server, runner), server.client() as http:
        runner.seconds = 0.02
        body = dict(model="tiny", prompt=["a", "b"], max_tokens=400, ignore_eos=True, stream=stream)
        if stream:
            with http.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/completions", json=body, timeout=1.0)
        wait_until(lambda: not server.llm.request_ids)
        wait_until(lambda: server.service.active == 0)
        assert server.service.answers["completions", 499] == 1
        assert server.llm.stats.snapshot()["ended"]["abort"] == 2
        runner.seconds = 0
        assert post(http, prompt="next").json()["choices"][0]["text"] == reply("next")


def test_failures_are_named_and_have_the_partial_text():
    with live_server(read_fails_at=12) as (server, runner), server.client() as http:
        runner.seconds = 0.001
        answer = post(http, prompt="abcdefgh" * 4)
        error = answer.json()["error"]
        assert answer.status_code == 500 and error["type"] == "server_error"
        assert error["code"] == "generation_failed" and "device is on fire" in error["message"]
        (partial,) = error["partial"]
        assert partial["text"] and reply("abcdefgh" * 4).startswith(partial["text"])
        runner.read_fails_at = runner.dispatched + 12
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            text = ""
            with pytest.raises(openai.APIError, match="device is on fire"):
                for chunk in client.completions.create(
                    model="tiny", prompt="abcdefgh" * 4, stream=True
                ):
                    text += chunk.choices[0].text
            assert text and reply("abcdefgh" * 4).startswith(text)
        assert post(http, prompt="next").json()["choices"][0]["text"] == reply("next")
        assert http.get("/health").json() == {"status": "ok"}


def test_drain():
    limits = dict(drain_seconds=20)
    with live_server(limits=limits) as (server, runner), server.client() as http:
        runner.stop_at = 8
        with http.stream(
            "POST", "/v1/completions", json=dict(model="tiny", prompt="a" * 50, stream=True)
        ) as answer:
            assert runner.is_stopped.wait(10)
            server.begin_drain()
            wait_until(lambda: server.llm.state == "draining")
            refused = post(http, prompt="late")
            assert refused.status_code == 503 and refused.headers["retry-after"] == "20"
            assert refused.json()["error"]["code"] == "shutting_down"
            health = http.get("/health")
            assert health.status_code == 503 and health.json() == {"status": "draining"}
            runner.may_go.set()
            text = answer.read().decode()
        assert text.endswith("data: [DONE]\n\n") and '"finish_reason":"stop"' in text
        server.stop()
        with pytest.raises(httpx.ConnectError):
            http.get("/health")


def test_a_drain_that_takes_too_long_aborts_with_the_text_so_far():
    with live_server(limits=dict(drain_seconds=0.2)) as (server, runner), server.client() as http:
        runner.seconds = 0.01
        answers = []
        body = dict(model="tiny", prompt="a" * 100, max_tokens=400, ignore_eos=True)
        thread = threading.Thread(
            target=lambda: answers.append(http.post("/v1/completions", json=body))
        )
        thread.start()
        wait_until(lambda: server.llm.stats.snapshot()["generated_tokens"] > 8)
        server.begin_drain()
        thread.join(20)
        (choice,) = answers[0].json()["choices"]
        assert choice["finish_reason"] == "abort"
        assert choice["text"] and reply("a" * 100).startswith(choice["text"])
        server.stop()

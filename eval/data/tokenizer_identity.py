"""Identity of the tokenizer that made the ids. Ids of another one are other words to a model: it fails on them,
however much it memorized, and nothing in the results shows why.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


# of what the library tokenizers writes down: padding, truncation and the decoder decide no id
_DECIDES_IDS = ("added_tokens", "normalizer", "pre_tokenizer", "model", "post_processor")
# For tokenizers in Python, whose settings are in no common place: case, accents, spaces, digits, another script.
_PROBE = "Tok tok  TOK 1234, caf\u00e9 na\u00efve.\n\n\tx = [1]; \u4e2d\u6587"


def tokenizer_identity(tokenizer) -> dict[str, Any] | None:
    """Return an identity that distinguishes a tokenizer from others.

    Returns:
        `path`, where it was loaded from; `size`, the number of its tokens, added ones included; `sha256`, in hex, of
        all that decides ids: vocabulary, added tokens, normalizer, pre-tokenizer, merges and post-processor. It stays
        the same when the tokenizer is saved, moved and loaded; padding, truncation, decoder and chat template do not
        enter. None for what is no tokenizer of Transformers.
    """
    if not hasattr(tokenizer, "get_vocab"):
        return None
    content = {
        "vocabulary": sorted((repr(token), number) for token, number in tokenizer.get_vocab().items()),
        "split_special_tokens": bool(getattr(tokenizer, "split_special_tokens", False)),
    }
    to_json = getattr(getattr(tokenizer, "backend_tokenizer", None), "to_str", None)
    if to_json is not None:
        written = json.loads(to_json())
        content |= {name: written[name] for name in _DECIDES_IDS}
    else:
        content |= _describe_python(tokenizer)
    return {
        "path": str(getattr(tokenizer, "name_or_path", "")),
        "size": len(tokenizer),
        "sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(),
    }


def _describe_python(tokenizer) -> dict[str, Any]:
    with TemporaryDirectory() as directory:
        with suppress(NotImplementedError):
            tokenizer.save_vocabulary(directory)
        files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in Path(directory).iterdir()}
    return {"class": type(tokenizer).__name__, "files": files, "probe": list(tokenizer.encode(_PROBE))}


def check_ids(tokenizer, largest_id: int) -> None:
    """Raise unless a tokenizer can have made samples with ids up to `largest_id`.

    Raises:
        ValueError: the tokenizer has no such id.
    """
    if not hasattr(tokenizer, "get_vocab"):
        return
    last = max(tokenizer.get_vocab().values(), default=-1)
    if largest_id > last:
        raise ValueError(
            f"there is a token id {largest_id}, but the ids of the tokenizer "
            f"({_where(getattr(tokenizer, 'name_or_path', ''))}) end at {last}: another one made the samples. Build "
            "them with this one, or name the other (tokenizer=..., --tokenizer)."
        )


def check_same(own: Mapping[str, Any] | None, made_with: Mapping[str, Any] | None) -> bool:
    """Raise if the samples were made with another tokenizer than the one of the model.

    Args:
        own: `tokenizer_identity` of the model's.
        made_with: the same of the samples', as their about file has it.
    Returns:
        Whether this could be checked; not if one of the two is unknown.
    Raises:
        ValueError: they differ; the message has paths, sizes, hashes and what to do.
    """
    if own is None or made_with is None:
        return False
    if own["sha256"] == made_with["sha256"]:
        return True
    model_path, samples_path = _where(own["path"]), _where(made_with.get("path"))
    raise ValueError(
        "the samples were made with another tokenizer than the model's, so their ids are other words to the model: "
        f"theirs is {samples_path} ({made_with.get('size')} tokens, sha256 {made_with['sha256']}), the model's is "
        f"{model_path} ({own['size']} tokens, sha256 {own['sha256']}). Write the samples again with --tokenizer "
        f"{model_path}; or, if the model was trained with the samples' tokenizer, run extract with --tokenizer "
        f"{samples_path}. If both are the same files, another release of transformers or tokenizers read them: write "
        "the samples again, and the sha256 of the samples tells whether an id changed."
    )


def _where(path: object) -> str:
    return str(path or "in memory")

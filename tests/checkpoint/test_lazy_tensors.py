"""Tensors still in a file: what is read after any conversion equals a slice of the converted whole, and no more is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_axonn.checkpoint.lazy_tensors import LazyTensor, read, unread


def _tensors(*shape: int, count: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shape))
    return [torch.randn(shape, generator=generator) for _ in range(count)]


# name: (tensors in the file, what a converter makes of them)
CONVERSIONS = {
    "as it is": (_tensors(6, 5), lambda a: a),
    "joined": (_tensors(4, 6, count=3), lambda *parts: torch.cat(parts, dim=0)),
    "joined along the last dim": (_tensors(4, 6, count=2), lambda *parts: torch.cat(parts, dim=-1)),
    "experts": (_tensors(3, 4, count=5), lambda *parts: torch.stack(parts, dim=0)),
    "stacked along the last dim": (_tensors(3, 4, count=5), lambda *parts: torch.stack(parts, dim=-1)),
    "gate and up of experts": (
        _tensors(3, 4, count=6),
        lambda *parts: torch.cat([torch.stack(parts[:3]), torch.stack(parts[3:])], dim=1),
    ),
    "key of query, key, value": (_tensors(9, 4), lambda a: torch.chunk(a, 3, dim=0)[1].contiguous()),
    "a chunk that is shorter": (_tensors(10, 4), lambda a: torch.chunk(a, 4, dim=0)[3]),
    "sizes given": (_tensors(4, 10), lambda a: torch.split(a, [1, 6, 3], dim=1)[1]),
    "transposed": (_tensors(3, 4, 5), lambda a: torch.transpose(a, 1, 2).contiguous()),
    "transposed, then a part": (_tensors(3, 4, 6), lambda a: a.transpose(-1, 0).chunk(2, dim=0)[1]),
    "one of a list": (_tensors(3, 4, 5), lambda a: torch.unbind(a, dim=1)[2]),
    "squeezed": (_tensors(3, 1, 5), lambda a: a.squeeze(1).unsqueeze(-1)),
    "squeezed, not of size 1": (_tensors(3, 2), lambda a: a.squeeze(1)),
    "no dims": (_tensors(), lambda a: a),
    "for another device": (_tensors(3, 4), lambda a: a.to("cpu", non_blocking=True)),
    # Not remembered: read whole, and right all the same.
    "rotary halves": (_tensors(8, 3), lambda a: a.view(2, 2, 2, 3).transpose(1, 2).reshape(8, 3)),
    "arithmetic": (_tensors(8, 3), lambda a: 1 + a * 2),
    "an entry": (_tensors(8, 3), lambda a: a[2:5]),
    "the transpose as a property": (_tensors(8, 3), lambda a: a.T),
    "joined with a tensor": (_tensors(4, 3), lambda a: torch.cat([a, torch.ones(2, 3)])),
}
WHOLE = ("rotary halves", "arithmetic", "an entry", "the transpose as a property", "joined with a tensor")


@pytest.fixture
def stored(tmp_path):
    """Tensors as slices of a safetensors file."""
    files = []

    def store(tensors):
        save_file({str(i): tensor for i, tensor in enumerate(tensors)}, tmp_path / "file.safetensors")
        files.append(safe_open(tmp_path / "file.safetensors", framework="pt"))
        return [files[-1].get_slice(str(i)) for i in range(len(tensors))]

    return store


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_part_of_a_conversion_is_that_part_of_the_result(name, stored):
    tensors, convert = CONVERSIONS[name]
    expected = convert(*tensors)
    result = convert(*map(unread, stored(tensors)))
    assert isinstance(result, LazyTensor) == (name not in WHOLE)
    if name in WHOLE:
        assert torch.equal(result, expected)
        result = unread(result)
    assert (result.shape, result.dtype, result.ndim) == (expected.shape, expected.dtype, expected.ndim)
    assert torch.equal(read(result), expected)
    for k in range(6):
        region = tuple(slice(size * k // 7, size * (k + 2) // 7) for size in expected.shape)
        with ThreadPoolExecutor(2) as readers:
            part = read(result, region, readers=readers)
        assert part.is_contiguous() and torch.equal(part, expected[region])


def test_no_more_is_read_than_the_part(monkeypatch):
    class Counted:
        def __init__(self, tensor):
            self.tensor, self.count = tensor, 0

        def get_shape(self):
            return list(self.tensor.shape)

        def __getitem__(self, region):
            self.count += self.tensor[region].numel()
            return self.tensor[region]

    gates, ups = ([Counted(tensor) for tensor in _tensors(8, 6, count=4)] for _ in range(2))
    joined = torch.cat([torch.stack([unread(its, torch.float32) for its in part]) for part in (gates, ups)], dim=1)
    assert joined.shape == (4, 16, 6)
    assert read(joined, (slice(1, 3), slice(4, 12), slice(0, 2))).shape == (2, 8, 2)
    assert [its.count for its in gates] == [its.count for its in ups] == [0, 8, 8, 0]

    source = Counted(_tensors(12, 6)[0])
    value = unread(source, torch.float32).chunk(3)[2].transpose(0, 1)
    read(value, (slice(0, 6), slice(1, 3)))
    assert source.count == 12


def test_what_is_read_has_memory_of_its_own_and_the_dtype_asked_for(stored, tmp_path):
    (tensor,) = _tensors(1000, 8)
    (source,) = stored([tensor])
    part = read(unread(source), (slice(10, 20), slice(0, 8)))
    assert part.untyped_storage().nbytes() == 10 * 8 * 4
    with open(tmp_path / "file.safetensors", "r+b") as file:
        file.seek(200)
        file.write(bytes(20_000))
    assert torch.equal(part, tensor[10:20])
    half = unread(tensor, torch.bfloat16)
    assert half.dtype == torch.bfloat16 and torch.equal(read(half), tensor.bfloat16())


def test_what_torch_refuses_is_refused(stored):
    a, b = map(unread, stored([torch.ones(2, 3), torch.ones(3, 4)]))
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([a, b])
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        torch.stack([a, b])
    with pytest.raises(RuntimeError, match="split"):
        torch.split(a, [1, 3], dim=0)

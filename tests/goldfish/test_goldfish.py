"""Goldfish masks against an independent reading of the reference, frozen masks, and the properties they are for."""

import math

import pytest
import torch

from hf_axonn.engine.documents import document_ids_from_position_ids, find_document_ids, positions_in_document
from hf_axonn.goldfish.mask import STRATEGIES, count_unprotected, goldfish_mask


H = 13
HASHES = ("hash-table", "hash", "hash-avalanche")
SEQUENCE = [(7919 * i * i + 104729 * i + 17) % 32000 for i in range(64)]


def wrap(number: int) -> int:
    """The int64 with the same low 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


def reference_hash_table(tokens: list[int], k: int, width: int) -> list[bool]:
    """The reference as its definition reads, in Python's own integers: shift first, then windows over the targets."""
    table = torch.rand(1_000_003, generator=torch.Generator().manual_seed(2971215073)).tolist()
    threshold = torch.tensor(1 / k, dtype=torch.float32).item()
    targets = tokens[1:]
    dropped = [False] * len(tokens)
    for end in range(width - 1, len(targets)):
        key = 1
        for token in targets[end - width + 1 : end + 1]:
            key = wrap(key * token)
        dropped[end + 1] = table[key % 1_000_003] < threshold
    return dropped


def reference_avalanche(tokens: list[int], k: int, width: int) -> list[bool]:
    """The reference's hash in Python's own integers: modulo 2**64, where each first product is cut to 32 bits."""
    threshold = torch.tensor((2**32 - 1) / k, dtype=torch.float32).item()
    dropped = [False] * len(tokens)
    for t in range(width, len(tokens)):
        key = math.prod(tokens[t - width + 1 : t + 1])
        for factor, addend, shift in ((2**21 - 1, -1, 24), (1 + 2**3 + 2**8, 0, 14), (1 + 2**2 + 2**4, 0, 28)):
            key = (key * factor + addend) % 2**32
            key = (key * factor + addend) % 2**64
            key ^= key >> shift
        key = (key + (key << 31)) % 2**32
        dropped[t] = torch.tensor(float(key), dtype=torch.float32).item() < threshold
    return dropped


def mix(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def reference_hash(tokens: list[int], k: int, width: int) -> list[bool]:
    dropped = [False] * len(tokens)
    for t in range(width, len(tokens)):
        state = 0
        for token in tokens[t - width : t]:
            state = mix(((state ^ token) + 0x9E3779B97F4A7C15) % 2**64)
        dropped[t] = state >> 1 < 2**63 // k
    return dropped


def reference_random(rows: int, length: int, k: int, seed: int, step: int, samples: list[int]) -> list[list[bool]]:
    gamma, masks = 0x9E3779B97F4A7C15, []
    for row in range(rows):
        key = 0
        for part in (seed, step, samples[row]):
            key = mix(((key ^ part % 2**64) + gamma) % 2**64)
        masks.append([t > 0 and mix((key + (t + 1) * gamma) % 2**64) >> 1 < 2**63 // k for t in range(length)])
    return masks


def reference_seeded(rows: int, length: int, k: int, seed: int, step: int, samples: list[int]) -> list[list[bool]]:
    masks = []
    for row in range(rows):
        key = 0
        for part in (seed, step, samples[row]):
            key = mix(((key ^ part % 2**64) + 0x9E3779B97F4A7C15) % 2**64)
        torch.manual_seed(key % 2**32)
        masks.append([False, *(torch.randint(1, k + 1, (length - 1,)) == k).tolist()])
    return masks


def positions(mask: torch.Tensor) -> list[int]:
    return mask.nonzero()[:, -1].tolist()


def long_row(length: int, *, vocab: int = 32000, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, vocab, (1, length), generator=torch.Generator().manual_seed(seed))


# Frozen: any change of a mask makes runs incomparable with those before it.
GOLDEN = {
    "hash-table": [14, 15, 16, 18, 22, 23, 28, 32, 38, 42, 51, 54],
    "hash": [17, 22, 23, 28, 29, 31, 36, 42, 49, 50],
    "hash-avalanche": [19, 28, 29, 34, 38, 41, 42, 45, 50, 53, 58, 63],
    "static": list(range(1, 64, 4)),
    "random": [1, 4, 7, 15, 16, 19, 22, 25, 27, 28, 31, 32, 34, 36, 42],
    "seeded_random": [1, 4, 10, 16, 21, 28, 29, 30, 33, 36, 47, 49, 51, 54],
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_golden_mask(strategy):
    assert positions(goldfish_mask(torch.tensor([SEQUENCE]), strategy=strategy, seed=42, step=3)) == GOLDEN[strategy]


@pytest.mark.parametrize("k", (2, 3, 4, 50))
@pytest.mark.parametrize("width", (1, 2, 13, 50))
@pytest.mark.parametrize(
    ("strategy", "reference"),
    (("hash-table", reference_hash_table), ("hash", reference_hash), ("hash-avalanche", reference_avalanche)),
)
def test_hashes_equal_their_definition(strategy, reference, k, width):
    tokens = long_row(400, seed=k)
    tokens[0, 200] = 0  # a zero id collapses the product of its window
    mask = goldfish_mask(tokens, strategy=strategy, k=k, context_width=width)
    assert mask[0].tolist() == reference(tokens[0].tolist(), k, width)


def test_labels_are_hashed_as_by_the_reference():
    tokens, labels = long_row(200, seed=1), long_row(200, seed=1)
    labels[0, 20:90] = labels[0, 150:] = -100
    mask = goldfish_mask(tokens, labels, hash_labels=True)
    expected = reference_hash_table([-1 if label == -100 else label for label in labels[0].tolist()], 4, 13)
    assert mask[0].tolist() == [dropped and label != -100 for dropped, label in zip(expected, labels[0], strict=True)]
    by_tokens = goldfish_mask(tokens, labels)
    assert mask[0, 103:].tolist() == by_tokens[0, 103:].tolist()  # no window reaches into the prompt any more
    assert mask[0, 90:103].tolist() != by_tokens[0, 90:103].tolist()


def test_random_equals_its_definition():
    mask = goldfish_mask(
        torch.zeros(3, 40, dtype=torch.long),
        strategy="random",
        k=3,
        seed=-7,
        step=11,
        sample_ids=torch.tensor([5, 0, 9]),
    )
    assert mask.tolist() == reference_random(3, 40, 3, -7, 11, [5, 0, 9])


def test_seeded_random_equals_its_definition():
    with torch.random.fork_rng(devices=[]):
        expected = reference_seeded(3, 40, 3, -7, 11, [5, 0, 9])
    mask = goldfish_mask(
        torch.zeros(3, 40, dtype=torch.long),
        strategy="seeded_random",
        k=3,
        seed=-7,
        step=11,
        sample_ids=torch.tensor([5, 0, 9]),
    )
    assert mask.tolist() == expected


def test_a_generator_is_drawn_from_as_the_authors_draw_from_torchs():
    """Batch after batch in order, [B, S-1] at once; whatever else draws in between is part of the order."""
    tokens = torch.zeros(3, 21, dtype=torch.long)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        expected = [torch.randint(1, 5, (3, 20)) == 4, torch.rand(7), torch.randint(1, 5, (3, 20)) == 4]
        torch.manual_seed(5)
        mine = [
            goldfish_mask(tokens, strategy="seeded_random", generator=torch.default_generator)[:, 1:],
            torch.rand(7),
            goldfish_mask(tokens, strategy="seeded_random", generator=torch.default_generator)[:, 1:],
        ]
    assert all(torch.equal(one, other) for one, other in zip(mine, expected, strict=True))


@pytest.mark.parametrize("start", (0, 1, 3, 9, 500))
def test_static_starts_where_it_is_told_to_in_each_document(start):
    tokens, ids = torch.zeros(1, 100, dtype=torch.long), (torch.arange(100) >= 41).long()[None]
    mask = goldfish_mask(tokens, None, ids, strategy="static", k=4, start_position=start)
    expected = [t for t in range(1, 41) if t - 1 in range(start, 100, 4)]
    expected += [41 + t for t in range(1, 59) if t - 1 in range(start, 100, 4)]
    assert positions(mask) == expected


@pytest.mark.parametrize("strategy", HASHES)
def test_first_labels_are_never_dropped(strategy):
    """Nothing can be dropped from h tokens; from h + 1 only the last label, and over many rows about one in k is."""
    rows = torch.randint(1, 32000, (4000, H + 1), generator=torch.Generator().manual_seed(1))
    assert not goldfish_mask(rows[:, :H], strategy=strategy).any()
    mask = goldfish_mask(rows, strategy=strategy)
    assert not mask[:, :H].any()
    assert 900 < mask[:, H].sum() < 1100


def test_golden_masks_at_the_shortest_lengths():
    """The h + 1 tokens that end in the first dropped label, and those from place 0, which end in a kept one."""
    start = GOLDEN["hash-table"][0] - H
    for first in (0, start):
        row = torch.tensor([SEQUENCE[first : first + H + 1]])
        assert positions(goldfish_mask(row[:, :H])) == []
        assert positions(goldfish_mask(row)) == ([H] if first == start else [])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("k", (2, 4, 32))
def test_one_label_in_k_is_dropped(strategy, k):
    share = goldfish_mask(long_row(40_000), strategy=strategy, k=k).float().mean().item()
    assert share == pytest.approx(1 / k, rel=0.06)


def test_same_passage_is_masked_alike_wherever_it_is():
    """In a packed row each document has the mask that it has alone; prompts (labels -100) feed the windows."""
    documents = [long_row(length, seed=length) for length in (30, 5, H, H + 1, 64)]
    packed = torch.cat(documents, dim=1)
    ids = torch.cat([torch.full_like(part, number) for number, part in enumerate(documents)], dim=1)
    for strategy in (*HASHES, "static"):
        alone = torch.cat([goldfish_mask(part, strategy=strategy) for part in documents], dim=1)
        assert torch.equal(goldfish_mask(packed, None, ids, strategy=strategy), alone)
        assert not torch.equal(goldfish_mask(packed, strategy=strategy), alone)  # windows would cross documents


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_labels_that_are_ignored_are_not_dropped_and_do_not_change_the_others(strategy):
    tokens = torch.tensor([SEQUENCE, SEQUENCE[::-1]])
    labels = tokens.clone()
    labels[:, :30] = -100
    labels[1, 50:] = -100
    full, prompted = goldfish_mask(tokens, strategy=strategy), goldfish_mask(tokens, labels, strategy=strategy)
    assert not prompted[labels == -100].any()
    assert torch.equal(prompted, full & (labels != -100))
    assert prompted.any()


def test_order_counts_for_hash_and_not_for_the_product():
    tokens = long_row(2000)
    swapped = tokens.clone()
    for t in range(1, 1999, 2):  # the pairs (1, 2), (3, 4) ... turned round
        swapped[0, t], swapped[0, t + 1] = tokens[0, t + 1], tokens[0, t]
    same = torch.arange(12, 1998, 2)  # windows of 12 targets that end at an even place hold whole pairs
    tables = [goldfish_mask(row, strategy="hash-table", context_width=12)[0, same] for row in (tokens, swapped)]
    hashes = [goldfish_mask(row, strategy="hash", context_width=12)[0, same + 1] for row in (tokens, swapped)]
    assert torch.equal(*tables)
    assert not torch.equal(*hashes)


def test_products_of_wide_windows_are_often_zero():
    """With h = 50 a window of independent ids has 50 factors 2 in the mean, and 64 of them make the product 0.

    Then all such windows have one number of the table, 0.23, which k = 50 keeps: docs/goldfish.md has these shares.
    """
    tokens = torch.randint(1, 131_072, (128, 4097), generator=torch.Generator().manual_seed(0))
    mask = goldfish_mask(tokens, k=50, context_width=50)[:, 50:]
    twos = sum((tokens % 2**power == 0).int() for power in range(1, 17))
    zero = twos[:, 1:].unfold(1, 50, 1).sum(dim=-1) >= 64
    assert zero.float().mean().item() == pytest.approx(0.09, abs=0.005)  # rounded, as there
    assert mask.float().mean().item() == pytest.approx(0.016, abs=0.0005)
    assert not mask[zero].any()


@pytest.mark.parametrize("strategy", ("random", "seeded_random"))
def test_random_drops_each_element_by_itself(strategy):
    """Every row and every column has about a quarter dropped, and neighbours are uncorrelated."""
    mask = goldfish_mask(torch.zeros(300, 301, dtype=torch.long), strategy=strategy, seed=1)
    assert not mask[:, 0].any()
    coins = mask[:, 1:].float()
    for share in (coins.mean(dim=0), coins.mean(dim=1)):
        assert 0.13 < share.min() and share.max() < 0.37  # 0.25 +- 5 sigma of 300 coins
    deviations = coins - 0.25
    for other in (deviations.roll(1, 0), deviations.roll(1, 1)):
        assert abs((deviations * other).mean().item()) < 5 * 0.1875 / 300


@pytest.mark.parametrize("strategy", ("random", "seeded_random"))
def test_random_is_keyed_by_seed_step_and_sample_and_not_by_the_batch(strategy):
    tokens = torch.zeros(4, 50, dtype=torch.long)
    key = {"strategy": strategy, "seed": 3, "step": 7}
    whole = goldfish_mask(tokens, **key)
    parts = [goldfish_mask(tokens[i : i + 2], **key, sample_ids=torch.arange(i, i + 2)) for i in (0, 2)]
    assert torch.equal(whole, torch.cat(parts))
    assert torch.equal(whole[:, :20], goldfish_mask(tokens[:, :20], **key))
    assert len({tuple(row.tolist()) for row in whole}) == 4
    for changed in ({"seed": 4}, {"step": 8}):
        assert not torch.equal(whole, goldfish_mask(tokens, **(key | changed)))


def test_global_random_state_is_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for strategy in STRATEGIES:
        goldfish_mask(torch.tensor([SEQUENCE]), strategy=strategy)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU's masks with the CPU's: no GPU here")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_device_has_the_same_mask(strategy):
    tokens = long_row(20_000)
    tokens[0, 500] = 0
    ids = torch.arange(20_000)[None] // 700
    on_cpu = goldfish_mask(tokens, tokens, ids, strategy=strategy, seed=3)
    on_gpu = goldfish_mask(tokens.cuda(), tokens.cuda(), ids.cuda(), strategy=strategy, seed=3)
    assert on_gpu.is_cuda and torch.equal(on_cpu, on_gpu.cpu())


def test_document_ids():
    places = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7], [1, 1, 0, 1, 2, 0, 0, 1]])
    assert document_ids_from_position_ids(places).tolist() == [
        [0, 0, 0, 1, 1, 2, 2, 2],
        [0] * 8,
        [0, 1, 2, 2, 2, 3, 4, 4],
    ]
    ids = torch.tensor([[4, 4, 4, 2, 2, 4, 4, 4]])
    assert positions_in_document(ids, ids).tolist() == places[:1].tolist()
    assert positions_in_document(ids).tolist() == [list(range(8))]


def test_document_ids_from_what_a_collator_gives():
    tokens = torch.zeros(1, 6, dtype=torch.long)
    expected = [0, 1, 2, 0, 1, 2]
    for given in (
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])},
        {"position_ids": torch.tensor([[2, 3, 4, 2, 3, 4]])},
        {"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]], dtype=torch.int32)},
        {"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 2]])},
        {"cu_seq_lens_q": torch.tensor([0, 3, 6], dtype=torch.int32)},
    ):
        assert positions_in_document(tokens, find_document_ids(tokens, **given)).tolist() == [expected], given
    both = {"position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]]), "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]])}
    assert positions_in_document(tokens, find_document_ids(tokens, **both)).tolist() == [[0, 1, 0, 1, 0, 1]]
    assert find_document_ids(tokens) is None
    assert find_document_ids(tokens, attention_mask=torch.ones(1, 1, 6, 6)) is None
    two_rows = find_document_ids(tokens.repeat(2, 1), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))
    assert positions_in_document(two_rows, two_rows).tolist() == [expected, expected]


def test_left_padding_does_not_change_a_mask():
    tokens, mask = torch.tensor([SEQUENCE]), torch.ones(1, 64, dtype=torch.long)
    padded = torch.cat([torch.full((1, 10), 2), tokens], dim=1)
    ids = find_document_ids(padded, attention_mask=torch.cat([torch.zeros(1, 10, dtype=torch.long), mask], dim=1))
    assert torch.equal(goldfish_mask(padded, None, ids)[:, 10:], goldfish_mask(tokens))


def test_unprotected_documents_are_counted():
    """Documents of 13, 14 and 3 tokens in a row of 30; a row of 30; a row with a long prompt; a row of padding."""
    ids = torch.zeros(4, 30, dtype=torch.long)
    ids[0, 13:27], ids[0, 27:] = 1, 2
    labels = torch.ones(4, 30, dtype=torch.long)
    labels[2, :25] = -100
    labels[3] = -100
    assert [int(n) for n in count_unprotected(labels, ids, context_width=H)] == [2, 5]
    assert [int(n) for n in count_unprotected(labels, context_width=30)] == [3, 3]
    labels[1, H:] = -100  # a short document, padded on the right
    assert [int(n) for n in count_unprotected(labels, ids, context_width=H)] == [3, 5]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_first_label_of_a_document_is_never_dropped(strategy):
    ids = torch.arange(3000)[None] // 3
    mask = goldfish_mask(long_row(3000), None, ids, strategy=strategy, k=2, context_width=1)
    assert not mask[:, ::3].any() and mask[:, 1::3].any() and mask[:, 2::3].any() == (strategy != "static")


def test_rows_of_one_token_and_none():
    for strategy in STRATEGIES:
        for shape in ((2, 1), (0, 5), (2, 0)):
            assert not goldfish_mask(torch.zeros(shape, dtype=torch.long), strategy=strategy).any()


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"k": 1}, "k is 1.*at least 2"),
        ({"k": 2.5}, "k is 2.5"),
        ({"k": True}, "k is True"),
        ({"context_width": 0}, "context_width is 0"),
        ({"strategy": "hash-legacy"}, "hash-legacy.*hash-table, hash, hash-avalanche, static, random"),
        ({"start_position": -1, "strategy": "static"}, "start_position is -1"),
        ({"start_position": 1.0, "strategy": "static"}, "start_position is 1.0"),
        ({"start_position": 2}, "start_position is 2, but hash-table has none"),
        ({"table": torch.zeros(7)}, r"table of shape \(7,\)"),
        ({"table": torch.zeros(1_000_003), "strategy": "hash"}, "'hash': only hash-table"),
        ({"generator": torch.Generator()}, "'hash-table' draws nothing"),
        ({"labels": torch.zeros(2, 7)}, r"labels have shape \(2, 7\) but input_ids \(2, 8\)"),
        ({"document_ids": torch.zeros(1, 8)}, r"document_ids have shape \(1, 8\)"),
        ({"sample_ids": torch.zeros(3)}, r"sample_ids have shape \(3,\)"),
    ),
)
def test_wrong_input_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        goldfish_mask(torch.zeros(2, 8, dtype=torch.long), **options)


def test_ids_must_be_rows():
    with pytest.raises(ValueError, match=r"shape \(8,\).*\[batch, sequence\]"):
        goldfish_mask(torch.zeros(8, dtype=torch.long))

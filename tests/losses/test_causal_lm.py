"""The per-token loss against Transformers' own, and the sums it keeps."""

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_axonn.losses.causal_lm import CausalLMLoss, LossRecord, install_causal_lm_loss, mean_losses


B, S, V = 3, 11, 29


def batch(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(B, S, V, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (B, S), generator=generator)
    labels[0, :4] = -100
    labels[2, 7:] = -100
    return logits, labels


def by_hand(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[B, S-1] nll, 0 where ignored."""
    log_probs = logits.detach().double().log_softmax(-1)[:, :-1]
    targets = labels[:, 1:]
    return -log_probs.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets != -100)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("num_items", (None, 40, torch.tensor(40), torch.tensor(40.0)))
@pytest.mark.parametrize("shifted", (False, True))
def test_equals_transformers_loss_and_gradient_exactly(dtype, num_items, shifted):
    results = []
    for function in (ForCausalLMLoss, CausalLMLoss()):
        logits, labels = batch(dtype)
        extra = {"shift_labels": F.pad(labels[:, 1:], (0, 1), value=-100)} if shifted else {}
        loss = function(logits, None if shifted else labels, V, num_items_in_batch=num_items, **extra)
        loss.backward()
        results.append((loss.detach(), logits.grad))
    assert torch.equal(results[0][0], results[1][0]) and results[0][0].dtype == torch.float32
    assert torch.equal(results[0][1], results[1][1]) and results[0][1].abs().sum() > 0


def test_another_ignore_index():
    logits, labels = batch()
    ours = CausalLMLoss()(logits, labels.masked_fill(labels == -100, 5), V, ignore_index=5)
    assert ours == ForCausalLMLoss(logits, labels.masked_fill(labels == -100, 5), V, ignore_index=5)


def test_float64_stays_float64():
    logits, labels = batch(torch.float64)
    loss = CausalLMLoss()(logits, labels, V)
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(by_hand(logits, labels).sum().item() / (labels[:, 1:] != -100).sum().item())


@pytest.mark.parametrize("num_items", (None, 7))
def test_no_token_left_is_zero_and_not_nan(num_items):
    logits, labels = batch()
    loss = CausalLMLoss()(logits, torch.full_like(labels, -100), V, num_items_in_batch=num_items)
    loss.backward()
    assert loss == 0 and not logits.grad.any()
    assert CausalLMLoss()(logits, torch.full_like(labels, -100), V, num_items_in_batch=torch.tensor(0)) == 0


@pytest.mark.parametrize("shifted", (False, True))
@pytest.mark.parametrize("way", ("keyword", "watch"))
def test_record_of_kept_and_all_tokens(shifted, way):
    logits, labels = batch()
    dropped = torch.zeros_like(labels, dtype=torch.bool)
    dropped[:, 5] = dropped[1, 2] = True
    masked = labels.masked_fill(dropped, -100)
    nll, kept = by_hand(logits, labels), (masked[:, 1:] != -100)
    loss = CausalLMLoss()

    def shift(tensor):
        return F.pad(tensor[:, 1:], (0, 1), value=-100) if shifted else tensor

    for _ in range(2):
        arguments = {"shift_labels": shift(masked)} if shifted else {}
        if way == "keyword":
            value = loss(logits, masked, V, **arguments, unmasked_labels=shift(labels))
        else:
            with loss.watch(shift(labels)):
                value = loss(logits, masked, V, **arguments)
    assert torch.equal(value, ForCausalLMLoss(logits, masked, V))  # what is watched does not change the loss
    expected = [nll.sum(), (labels[:, 1:] != -100).sum(), (nll * kept).sum(), kept.sum()]
    sums = loss.record.pop()
    assert list(sums) == list(LossRecord.NAMES)
    assert list(sums.values()) == pytest.approx([2 * number.item() for number in expected])
    assert set(loss.record.pop().values()) == {0.0}


def test_record_only_in_training_and_only_when_asked():
    logits, labels = batch()
    loss = CausalLMLoss()
    loss(logits, labels, V)
    with torch.no_grad():
        loss(logits, labels, V, unmasked_labels=labels)
    assert loss.record.pop()["all_count"] == 0
    with loss.watch(labels):
        pass
    loss(logits, labels, V)
    assert loss.record.pop()["all_count"] == 0
    loss(logits, labels, V, unmasked_labels=labels)
    assert loss.record.pop()["all_count"] == (labels[:, 1:] != -100).sum()


def test_mean_losses():
    def means(*sums):
        return mean_losses(dict(zip(LossRecord.NAMES, sums, strict=True)))

    fraction = "goldfish_dropped_fraction"
    assert means(9.0, 4, 6.0, 3) == {"loss_all": 2.25, "loss_kept": 2.0, "loss_dropped": 3.0, fraction: 0.25}
    assert means(9.0, 3, 9.0, 3) == {"loss_all": 3.0, "loss_kept": 3.0, fraction: 0.0}
    assert means(9.0, 3, 0.0, 0) == {"loss_all": 3.0, "loss_dropped": 3.0, fraction: 1.0}
    assert means(0.0, 0, 0.0, 0) == {}


def test_capture_gives_each_row():
    logits, labels = batch()
    labels[1] = -100
    loss = CausalLMLoss()
    with torch.no_grad(), loss.capture() as rows:
        loss(logits, labels, V)
        loss(logits[:1], labels[:1], V)
    nll, counts = by_hand(logits, labels).sum(1), (labels[:, 1:] != -100).sum(1)
    expected = torch.stack([nll, counts.double()], dim=1)
    assert [len(part) for part in rows] == [3, 1]
    assert torch.allclose(torch.cat(rows).double(), torch.cat([expected, expected[:1]]), rtol=1e-6)
    assert rows[0][1].tolist() == [0, 0]
    loss(logits, labels, V)
    assert len(rows) == 2


def test_unmasked_labels_of_another_shape():
    logits, labels = batch()
    with pytest.raises(ValueError, match=r"unmasked_labels have shape \(3, 10\) but labels \(3, 11\)"):
        CausalLMLoss()(logits, labels, V, unmasked_labels=labels[:, 1:])


def test_install_keeps_a_loss_that_is_there_and_subclasses():
    class Sharded(CausalLMLoss):
        pass

    config = LlamaConfig(vocab_size=V, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, V, (2, 6))
    stock = model(input_ids=ids, labels=ids).loss
    loss = install_causal_lm_loss(model)
    assert model.loss_function is loss and install_causal_lm_loss(model) is loss
    assert torch.equal(model(input_ids=ids, labels=ids).loss, stock) and loss.calls == 1
    model.loss_function = mine = Sharded()
    assert install_causal_lm_loss(model) is mine


def test_install_refuses_other_models():
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    with pytest.raises(ValueError, match="BertForMaskedLM.*'ForMaskedLMLoss'.*decoder-only"):
        install_causal_lm_loss(BertForMaskedLM(BertConfig(vocab_size=V, **small)))
    with pytest.raises(ValueError, match="T5ForConditionalGeneration"):
        install_causal_lm_loss(T5ForConditionalGeneration(T5Config(vocab_size=V, d_model=8, d_ff=8, num_layers=1)))
    model = LlamaForCausalLM(LlamaConfig(vocab_size=V, **small))
    model.loss_function = lambda **kwargs: 0
    with pytest.raises(ValueError, match="LlamaForCausalLM.*<lambda>"):
        install_causal_lm_loss(model)
    with pytest.raises(ValueError, match="Linear"):
        install_causal_lm_loss(torch.nn.Linear(2, 2))

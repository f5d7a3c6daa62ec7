"""The training loop against torch.optim.AdamW and autograd; captured steps against eager ones."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from torch.nn import functional

from gigamlp.errors import InvalidInput, TrainingError
from gigamlp.train import Recipe
from gigamlp.train.network import Layout, pack, unpack
from gigamlp.train.trainer import Resident, Score, Trainer, evaluate

CPU = torch.device("cpu")


def resident(rows, features, outputs, head="softmax", device="cpu", dtype="uint8", seed=0):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (rows, features), dtype=np.uint8)
    truth = rng.standard_normal((features, outputs))
    values = (x / 255.0 - 0.5) @ truth
    if head == "softmax":
        target = torch.from_numpy(values.argmax(1))
    elif head == "regression":
        target = torch.from_numpy(values).float()
    else:
        target = torch.from_numpy(values > 0).float()
    mean = x.mean(0)
    if dtype == "uint8":
        data = torch.from_numpy(x), 1 / 255, torch.from_numpy(-mean / 255).float()
    elif dtype == "uint8-vector":
        scale = torch.linspace(0.5, 1.5, features) / 255
        data = torch.from_numpy(x), scale.to(device), torch.from_numpy(-mean).float() * scale
    else:
        data = torch.from_numpy((x - mean) / 255).float(), 1.0, torch.zeros(features)
    return Resident(data[0].to(device), target.to(device), data[1], data[2].to(device))


def start_of(layout, seed=0):
    rng = np.random.default_rng(seed)
    return pack(
        layout,
        [
            (rng.standard_normal((out, inputs)) / np.sqrt(inputs), 0.1 * rng.standard_normal(out) if has else None)
            for inputs, out, has in zip(layout.widths[:-1], layout.widths[1:], layout.biased, strict=True)
        ],
    )


def plain_torch(layout, recipe, data, start, seed):
    """The same training with autograd and torch.optim.AdamW; returns last and averaged (weight, bias) pairs."""
    act = {"relu": torch.relu, "tanh": torch.tanh, "identity": lambda z: z, "silu": functional.silu}
    parameters = [
        tuple(None if part is None else torch.from_numpy(part).requires_grad_() for part in pair)
        for pair in unpack(layout, start)
    ]
    weights, biases = [w for w, _ in parameters], [b for _, b in parameters if b is not None]
    optimiser = torch.optim.AdamW(
        [{"params": weights, "weight_decay": recipe.weight_decay}, {"params": biases, "weight_decay": 0.0}]
    )
    everything = [*weights, *biases]
    average = [p.detach().clone() for p in everything]
    per_epoch = len(data.x) // recipe.batch
    rates, _, fresh = recipe.tables(per_epoch * recipe.epochs)
    rng, at = np.random.default_rng(seed), 0
    for _ in range(recipe.epochs):
        order = np.arange(len(data.x), dtype=np.int32)
        rng.shuffle(order)
        for step in range(per_epoch):
            rows = torch.from_numpy(order[step * recipe.batch : (step + 1) * recipe.batch].astype(np.int64))
            h = data.x[rows].float() * data.scale + data.offset
            for (weight, bias), name in zip(parameters, layout.activations, strict=True):
                h = act[name](functional.linear(h, weight, bias))
            y = data.target[rows]
            if layout.head == "softmax":
                loss = functional.cross_entropy(h, y)
            elif layout.head == "regression":
                loss = functional.mse_loss(h, y)
            else:
                loss = functional.binary_cross_entropy_with_logits(h, y)
            optimiser.zero_grad()
            loss.backward()
            for group in optimiser.param_groups:
                group["lr"] = float(rates[at])
            optimiser.step()
            for mean, p in zip(average, everything, strict=True):
                mean.lerp_(p.detach(), float(fresh[at]))
            at += 1
    return [p.detach() for p in everything], average


def flat_parts(layout, flat):
    pairs = unpack(layout, flat.cpu().numpy())
    return [torch.from_numpy(w) for w, _ in pairs] + [torch.from_numpy(b) for _, b in pairs if b is not None]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(
    ("widths", "activations", "biased", "head", "dtype"),
    [
        ((20, 12, 10), ("relu", "identity"), (True, True), "softmax", "uint8"),
        ((20, 9, 7, 3), ("tanh", "silu", "identity"), (True, False, True), "softmax", "uint8-vector"),
        ((20, 3), ("identity",), (True,), "multilabel", "float32"),
        ((20, 6, 1), ("relu", "identity"), (True, True), "sigmoid", "uint8"),
        ((20, 6, 2), ("tanh", "identity"), (False, True), "regression", "uint8"),
    ],
)
def test_training_equals_torch_adamw(schedule, widths, activations, biased, head, dtype):
    layout = Layout(widths, activations, biased, head)
    # 100 rows in batches of 32: 3 steps an epoch and a tail that is left out
    recipe = Recipe(epochs=4, batch=32, lr=3e-3, weight_decay=0.2, ema=0.9, warmup=0.2, schedule=schedule)
    data = resident(100, widths[0], widths[-1], head, dtype=dtype)
    start = start_of(layout)
    trainer = Trainer(layout, recipe, data)
    trainer.reset(start, seed=5)
    trainer.run()
    last, average = plain_torch(layout, recipe, data, start, 5)
    for ours, theirs in zip(flat_parts(layout, trainer.weights), last, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)
    for ours, theirs in zip(flat_parts(layout, trainer.result()), average, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)
    assert trainer.steps == 12
    moved = (torch.from_numpy(start) - trainer.weights).abs().max()
    assert moved > 0.005  # the comparison is not one of starts


def small(recipe, device="cpu", graph=False, rows=1000, pad=None, dtype="uint8"):
    pad = device != "cpu" if pad is None else pad
    layout = Layout((20, 24, 10), ("relu", "identity"), (True, True), "softmax", pad)
    return layout, Trainer(layout, recipe, resident(rows, 20, 10, device=device, dtype=dtype), graph=graph)


def test_silent_classes_change_nothing():
    results = []
    for pad in (False, True):
        layout, trainer = small(Recipe(epochs=3, batch=64), pad=pad)
        trainer.reset(start_of(layout), seed=1)
        trainer.run()
        results.append(flat_parts(layout, trainer.result()))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_nearly_the_same_network(precision):
    scores = {}
    for kind in ("float32", precision):
        layout, trainer = small(Recipe(epochs=20, batch=50, precision=kind))
        trainer.reset(start_of(layout), seed=1)
        begin = evaluate(layout, trainer.result(), trainer.data)
        trainer.run()
        trainer.check()
        scores[kind] = evaluate(layout, trainer.result(), trainer.data)
        assert scores[kind].loss < 0.5 * begin.loss
    assert abs(scores[precision].loss - scores["float32"].loss) < 0.05


def test_an_overflow_in_fp16_skips_the_step_and_halves_the_scale():
    layout, trainer = small(Recipe(epochs=1, batch=50, precision="fp16"))
    trainer.reset(start_of(layout), seed=1)
    trainer._now[:, :1] = trainer._table[:, :1]
    assert trainer._now[0, 0] > 0
    trainer._scale.fill_(2.0**40)  # any gradient times this is infinite in float16
    before = trainer.weights.clone()
    with torch.no_grad():
        trainer.run_steps(1)
    assert torch.equal(before, trainer.weights)
    assert trainer._scale.item() == 2.0**39
    trainer._scale.fill_(1024.0)
    with torch.no_grad():
        trainer.run_steps(1)
    assert not torch.equal(before, trainer.weights)
    trainer.check()


def test_reset_starts_over_and_the_seed_orders_the_rows():
    layout, trainer = small(Recipe(epochs=2, batch=64))
    found = []
    for seed in (3, 3, 4):
        trainer.reset(start_of(layout), seed)
        trainer.run()
        found.append(trainer.result().clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_without_an_average_the_last_weights_are_kept():
    layout, trainer = small(Recipe(epochs=1, batch=64, ema=0.0))
    trainer.reset(start_of(layout), 0)
    trainer.run()
    assert trainer.result() is trainer.weights


def test_evaluate_equals_torch():
    layout, trainer = small(Recipe(batch=64), rows=9000)  # more rows than one chunk of the evaluation
    start = start_of(layout)
    data = trainer.data
    (w1, b1), (w2, b2) = [(torch.from_numpy(w), torch.from_numpy(b)) for w, b in unpack(layout, start)]
    x = data.x.float() / 255 + data.offset
    logits = functional.linear(torch.relu(functional.linear(x, w1, b1)), w2, b2)
    score = evaluate(layout, torch.from_numpy(start), data)
    assert score.loss == pytest.approx(functional.cross_entropy(logits, data.target).item(), rel=1e-5)
    assert score.accuracy == pytest.approx((logits.argmax(1) == data.target).float().mean().item(), abs=2e-4)


def test_scores_order_by_accuracy_then_loss():
    assert Score(2.0, 0.9).better_than(Score(1.0, 0.8))
    assert Score(0.5, 0.9).better_than(Score(1.0, 0.9))
    assert not Score(1.0, 0.9).better_than(Score(1.0, 0.9))
    assert Score(0.5, None).better_than(Score(1.0, None))
    assert Score(5.0, 0.1).better_than(None)


def test_settings_of_the_process_are_put_back_even_after_an_error():
    layout, trainer = small(Recipe(epochs=2, batch=64))
    torch.set_num_threads(2)
    flag = torch.backends.cuda.matmul.fp32_precision
    seen = []

    def stop(done):
        seen.append(torch.get_num_threads())
        raise KeyboardInterrupt

    trainer.reset(start_of(layout), 0)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(stop)
    assert seen == [1]  # the step is far too small for two
    assert torch.get_num_threads() == 2
    assert torch.backends.cuda.matmul.fp32_precision == flag


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(InvalidInput, match="batch 64 is larger than the 10"):
        small(Recipe(batch=64), rows=10)
    with pytest.raises(InvalidInput, match="CUDA graph"):
        small(Recipe(batch=64), graph=True)
    with pytest.raises(InvalidInput, match="tf32"):
        small(Recipe(batch=64, precision="tf32"))
    layout, trainer = small(Recipe(batch=64, lr=0.3))
    start = start_of(layout)
    start[0] = np.nan
    trainer.reset(start, 0)
    with pytest.raises(TrainingError, match="smaller lr"):
        trainer.check()


# ---- CUDA ------------------------------------------------------------------------------------------------------------


def train(trainer, layout, seed=2):
    trainer.reset(start_of(layout), seed)
    trainer.run()
    torch.cuda.synchronize()
    return trainer.weights.clone(), trainer.result().clone()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", ["uint8", "uint8-vector", "float32"])
def test_captured_steps_equal_eager_steps(precision, dtype):
    # 50 steps an epoch: two graphs' worth of 25; rates, step numbers and rows change with every replay
    recipe = Recipe(epochs=3, batch=40, lr=3e-3, precision=precision)
    layout, eager = small(recipe, "cuda", rows=2011, dtype=dtype)
    _, captured = small(recipe, "cuda", graph=True, rows=2011, dtype=dtype)
    assert captured._graphs
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if precision in ("float32", "tf32") else {"rtol": 5e-2, "atol": 5e-3}
    expected = train(eager, layout)
    for _ in range(2):  # and again after a reset in place
        for ours, theirs in zip(train(captured, layout), expected, strict=True):
            torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.gpu
def test_an_epoch_that_graphs_do_not_divide_evenly():
    recipe = Recipe(epochs=2, batch=30, lr=3e-3, precision="float32")
    layout, eager = small(recipe, "cuda", rows=1981)  # 66 steps: 22 + 22 + 22
    _, captured = small(recipe, "cuda", graph=True, rows=1951)  # 65 steps: 22 + 22 + 21
    assert sorted(captured._graphs) == [21, 22]
    _, eager = small(recipe, "cuda", rows=1951)
    for ours, theirs in zip(train(captured, layout), train(eager, layout), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_cuda_equals_the_cpu():
    recipe = Recipe(epochs=3, batch=40, lr=3e-3, precision="float32")
    layout, cuda = small(recipe, "cuda", graph=True)
    plain, cpu = small(recipe)
    cpu.reset(start_of(plain), 2)
    cpu.run()
    train(cuda, layout)
    for ours, theirs in zip(flat_parts(layout, cuda.result()), flat_parts(plain, cpu.result()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
def test_deleting_one_trainer_leaves_the_graphs_of_another_intact():
    recipe = Recipe(epochs=2, batch=40, precision="float32")
    layout, one = small(recipe, "cuda", graph=True)
    _, other = small(recipe, "cuda", graph=True)
    expected = train(other, layout)
    one.close()
    del one
    gc.collect()
    torch.cuda.empty_cache()
    for ours, theirs in zip(train(other, layout), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    other.close()
    other.close()


@pytest.mark.gpu
def test_graph_training_works_from_a_stream_of_the_caller():
    recipe = Recipe(epochs=2, batch=40, precision="float32")
    layout, trainer = small(recipe, "cuda", graph=True)
    expected = train(trainer, layout)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        trainer.reset(start_of(layout), 2)
        trainer.run()
        found = trainer.result().cpu()
    torch.testing.assert_close(found, expected[1].cpu(), rtol=1e-5, atol=1e-6)

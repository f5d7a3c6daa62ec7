"""A bank against separate networks with autograd and torch.optim.AdamW; captured steps against eager ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from gigamlp.errors import InvalidInput, TrainingError
from gigamlp.train import Recipe
from gigamlp.train.augment import TableAugment
from gigamlp.train.bank import Bank
from gigamlp.train.bank_layout import BankLayout, Student
from gigamlp.train.pool import Encoded, make_pool

CPU = torch.device("cpu")
SHORT = Recipe(epochs=3, batch=16, warmup=0.1, ema=0.9)
STUDENTS = (
    Student((5,), 0, lr=1e-2, weight_decay=0.3),
    Student((5,), 1, lr=3e-2, weight_decay=0.0, follow=1.0, temperature=1.0),
    Student((16,), 0, lr=2e-3, weight_decay=0.1, follow=0.4, temperature=3.0),
    Student((1,), 7, lr=1e-2),
    Student((9, 6, 3), 2, lr=1e-2, weight_decay=0.2, follow=0.5, temperature=2.0),
    Student((9, 6, 3), 3, lr=5e-3, weight_decay=0.2),
)


def make(rows=70, features=11, classes=3, dtype="uint8", device="cpu", taught=True, seed=0, soft=False):
    random = np.random.default_rng(seed)
    x = random.integers(0, 256, (rows, features), dtype=np.uint8)
    y = (x.astype(float) @ random.standard_normal((features, classes))).argmax(1)
    scale = np.full(features, 1 / 255)
    if dtype == "float32":
        x = ((x - x.mean(0)) / 255).astype(np.float32)
        scale = np.ones(features)
    source = Encoded(
        torch.from_numpy(x).to(device),
        torch.from_numpy(y).to(device),
        classes,
        float(scale[0]),
        torch.from_numpy(-x.mean(0) * scale[0]).float().to(device),
        torch.from_numpy(x.std(0)).float().to(device),
    )
    augment = TableAugment(noise=0.1, mixup=0.5 if soft else 0)
    pool = make_pool(source, augment, (1.0, 1.0, 0.0), seed=seed)
    if taught:
        matrix = torch.from_numpy(random.standard_normal((features, classes))).float().to(device)
        pool = pool.taught(lambda rows: source.inputs(rows) @ matrix)
    return pool


def alone(student, pool, recipe, plan, seed=0):
    """The same training of one student, in float64, with autograd and torch.optim.AdamW; returns the average."""
    flat = BankLayout([student], pool.features, pool.classes).draw()
    layers = BankLayout([student], pool.features, pool.classes).networks(flat)[0]
    pairs = [(torch.tensor(np.array(la.weight)).double(), torch.tensor(np.array(la.bias)).double()) for la in layers]
    pairs = [(w.requires_grad_(), b.requires_grad_()) for w, b in pairs]
    optimiser = torch.optim.AdamW(
        [
            {"params": [w for w, _ in pairs], "weight_decay": student.weight_decay},
            {"params": [b for _, b in pairs], "weight_decay": 0.0},
        ],
        lr=student.lr,
    )
    average = [(w.detach().clone(), b.detach().clone()) for w, b in pairs]
    steps = pool.rows // recipe.batch
    rates, _, fresh = recipe.with_(lr=student.lr).tables(steps * recipe.epochs)
    t = student.temperature
    for epoch in range(recipe.epochs):
        order = np.random.default_rng([seed, epoch]).permutation(pool.rows) + plan[epoch] * pool.rows
        for step in range(steps):
            at = epoch * steps + step
            index = torch.from_numpy(order[step * recipe.batch : (step + 1) * recipe.batch])
            h = pool.source.inputs(pool.x[index]).double()
            target = pool.targets(index)[:, : pool.classes].double()
            for depth, (w, b) in enumerate(pairs):
                h = h @ w.t() + b
                h = h.relu() if depth < len(pairs) - 1 else h
            loss = (1 - student.follow) * functional.cross_entropy(h, target)
            if student.follow:
                taught = pool.logits[index][:, : pool.classes].double()
                wanted, got = functional.softmax(taught / t, 1), functional.log_softmax(h / t, 1)
                loss = loss + student.follow * t * t * functional.kl_div(got, wanted, reduction="batchmean")
            for group in optimiser.param_groups:
                group["lr"] = float(rates[at])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            for (aw, ab), (w, b) in zip(average, pairs, strict=True):
                aw.lerp_(w.detach(), float(fresh[at]))
                ab.lerp_(b.detach(), float(fresh[at]))
    return average


@pytest.mark.parametrize(("dtype", "soft"), [("uint8", False), ("float32", True)])
def test_a_bank_equals_separate_networks(dtype, soft):
    pool = make(dtype=dtype, soft=soft)
    plan = [0, 2, 1]
    bank = Bank(STUDENTS, pool, SHORT, seed=5, dtype=torch.float64)
    bank.run(plan)
    for student, layers in zip(STUDENTS, bank.networks(), strict=True):
        assert len(layers) == len(student.hidden) + 1
        for layer, (weight, bias) in zip(layers, alone(student, pool, SHORT, plan, seed=5), strict=True):
            # the start is rounded to float32 on the way to `alone`, inputs in both
            np.testing.assert_allclose(layer.weight, weight, rtol=2e-5, atol=2e-6)
            np.testing.assert_allclose(layer.bias, bias, rtol=2e-5, atol=2e-6)


def test_float32_stays_near_float64():
    pool = make()
    banks = [Bank(STUDENTS, pool, SHORT, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    for bank in banks:
        bank.run([0, 1, 2])
    np.testing.assert_allclose(banks[0].average, banks[1].average.float(), rtol=1e-3, atol=1e-4)


def test_gradient_is_that_of_autograd():
    pool = make()
    bank = Bank(STUDENTS, pool, SHORT, dtype=torch.float64)
    random = np.random.default_rng(0)
    z = torch.from_numpy(random.standard_normal((len(STUDENTS), 16, bank.layout.outputs))).requires_grad_()
    taught = torch.from_numpy(4 * random.standard_normal((16, bank.layout.outputs)))
    target = torch.softmax(torch.from_numpy(random.standard_normal((16, bank.layout.outputs))), 1)
    loss = 0.0
    for each, student in zip(z, STUDENTS, strict=True):
        t = student.temperature
        own = (1 - student.follow) * functional.cross_entropy(each, target)
        wanted, got = functional.softmax(taught / t, 1), functional.log_softmax(each / t, 1)
        loss = loss + own + student.follow * t * t * functional.kl_div(got, wanted, reduction="batchmean")
    loss.backward()
    torch.testing.assert_close(bank.loss_gradient(z.detach(), target, taught), z.grad, rtol=1e-12, atol=1e-15)


def test_padding_stays_silent():
    bank = Bank(STUDENTS, make(), SHORT)
    used = sum(student.hidden[0] for student in STUDENTS)
    bank.run([0, 0, 0])
    first = bank.layout.first(bank.weights)
    assert bank.layout.units > used
    assert not first[used:].any()
    assert not first[:, bank.layout.features + 1 :].any()
    for _, layers in bank.layout.later(bank.weights):
        weight, bias = layers[-1]
        assert not weight[:, 3:].any()
        assert (bias[:, 3:] == -1e4).all()


def test_a_student_is_the_same_in_any_company():
    pool = make(taught=False)
    few = Student((5,), 1, lr=3e-2)
    alone, many = Bank([few], pool, SHORT), Bank([Student((40,), 0), Student((5,), 0), few], pool, SHORT)
    for bank in (alone, many):
        bank.run([0, 1, 2])
    for one, other in zip(alone.networks()[0], many.networks()[2], strict=True):
        np.testing.assert_allclose(one.weight, other.weight, rtol=1e-4, atol=1e-5)


def test_restoring_goes_on_as_if_nothing_had_happened():
    pool = make()
    straight, first, second = (Bank(STUDENTS, pool, SHORT, seed=3) for _ in range(3))
    straight.run([0, 1, 2])
    first.run([0, 1, 2], until=1)
    second.restore(first.state(), 1)
    seen = []
    second.run([0, 1, 2], seen.append)
    assert seen == [2, 3]
    assert torch.equal(straight.weights, second.weights)
    assert torch.equal(straight.average, second.average)


def test_score_is_what_the_networks_give():
    pool = make(rows=200)
    bank = Bank(STUDENTS, pool, SHORT)
    bank.run([0, 1, 2])
    x, y = pool.source.x[:77], pool.source.y[:77]
    score = bank.score(x, y)
    inputs = pool.source.inputs(x).double().numpy()
    for index, layers in enumerate(bank.networks()):
        h = inputs
        for layer in layers:
            h = h @ layer.weight.T.astype(float) + layer.bias
            h = np.maximum(h, 0) if layer.activation == "relu" else h
        assert score.accuracy[index] == np.mean(h.argmax(1) == y.numpy())
        loss = functional.cross_entropy(torch.from_numpy(h), y)
        assert score.loss[index] == pytest.approx(float(loss), rel=1e-4)


def test_what_cannot_be_trained_is_refused():
    pool = make(taught=False)
    with pytest.raises(InvalidInput, match="side by side"):
        Bank([Student((3,)), Student((4,)), Student((3,), 1)], pool, SHORT)
    with pytest.raises(InvalidInput, match="at least one student"):
        Bank([], pool, SHORT)
    with pytest.raises(InvalidInput, match="no logits"):
        Bank([Student((3,), follow=0.5)], pool, SHORT)
    with pytest.raises(InvalidInput, match="larger than the 70 training rows"):
        Bank([Student((3,))], pool, SHORT.with_(batch=71))
    with pytest.raises(InvalidInput, match="not in fp16"):
        Bank([Student((3,))], pool, SHORT.with_(precision="fp16"))
    with pytest.raises(InvalidInput, match="whole numbers"):
        Student((0,))
    with pytest.raises(InvalidInput, match=r"follow in 0\.\.1"):
        Student((3,), follow=1.5)
    bank = Bank([Student((3,), lr=1e30)], pool, SHORT)
    bank.run([0, 1, 2])
    with pytest.raises(TrainingError, match="non-finite"):
        bank.check()


def test_layout_covers_the_flat_tensor_once():
    layout = BankLayout(STUDENTS, 11, 3)
    flat = torch.zeros(layout.size)
    layout.first(flat).add_(1)
    for _, layers in layout.later(flat):
        for weight, bias in layers:
            weight.add_(1)
            bias.add_(1)
    assert (flat == 1).all()


@pytest.mark.gpu
def test_captured_steps_equal_eager_ones():
    device = "cuda"
    pool = make(rows=300, device=device)
    recipe = SHORT.with_(precision="float32")
    eager, captured = (Bank(STUDENTS, pool, recipe, seed=1, graph=graph) for graph in (False, True))
    for bank in (eager, captured):
        bank.run([0, 1, 2])
    torch.testing.assert_close(eager.average, captured.average, rtol=1e-3, atol=1e-4)
    cpu = Bank(STUDENTS, make(rows=300), recipe, seed=1)
    cpu.run([0, 1, 2])
    torch.testing.assert_close(cpu.average, captured.average.cpu(), rtol=1e-2, atol=1e-2)
    captured.close()


@pytest.mark.gpu
def test_two_captured_banks_do_not_disturb_each_other():
    pool = make(rows=300, device="cuda")
    recipe = SHORT.with_(precision="float32")
    wanted = Bank(STUDENTS, pool, recipe, seed=1, graph=True)
    wanted.run([0, 1, 2])
    one, other = (Bank(STUDENTS, pool, recipe, seed=1, graph=True) for _ in range(2))
    other.run([0, 1, 2])
    other.close()
    del other
    one.run([0, 1, 2])
    torch.testing.assert_close(wanted.average, one.average, rtol=1e-5, atol=1e-6)

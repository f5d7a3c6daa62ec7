"""Forward and gradient, written by hand, against autograd in float64; packing against the MLP's own reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from gigamlp import MLP, Layer
from gigamlp.activations import ACTIVATIONS
from gigamlp.train.network import Layout, Workspace, forward, gradient, pack, unpack

TORCH = {
    "identity": lambda z: z,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "logistic": torch.sigmoid,
    "gelu": functional.gelu,
    "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
    "silu": functional.silu,
}


def network(widths, activations, biased, head="softmax", pad=False, seed=0):
    rng = np.random.default_rng(seed)
    layout = Layout(widths, activations, biased, head, pad)
    pairs = [
        (rng.standard_normal((out, inputs)) / np.sqrt(inputs), rng.standard_normal(out) if has else None)
        for inputs, out, has in zip(widths[:-1], widths[1:], biased, strict=True)
    ]
    return layout, pairs, rng


def augmented(layout, x):
    wide = torch.zeros(len(x), layout.shapes()[0][0])
    wide[:, : x.shape[1]] = torch.from_numpy(x)
    wide[:, x.shape[1]] = float(layout.biased[0])
    return wide


def loss_of(head, logits, y):
    if head == "softmax":
        return functional.cross_entropy(logits, y)
    if head == "regression":
        return functional.mse_loss(logits, y)
    return functional.binary_cross_entropy_with_logits(logits, y)


SHAPES = [
    ((5, 3), ("identity",), (True,)),  # no hidden layer
    ((7, 8, 4), ("relu", "identity"), (True, True)),  # a width that is a multiple of 8: the bias row starts a new one
    ((7, 9, 5, 3), ("relu", "relu", "identity"), (False, True, False)),
    *[((6, 5, 4, 3), (name, name, "identity"), (True, True, True)) for name in ACTIVATIONS],
    ((6, 5, 3), ("silu", "tanh"), (True, True)),  # an activation on the logits
    ((6, 5, 3), ("tanh", "silu"), (True, True)),  # one whose gradient needs its input
]


@pytest.mark.parametrize("head", ["softmax", "multilabel", "regression", "sigmoid"])
@pytest.mark.parametrize(("widths", "activations", "biased"), SHAPES)
@pytest.mark.parametrize("pad", [False, True])
def test_gradient_equals_autograd(head, widths, activations, biased, pad):
    if head == "sigmoid":
        widths = (*widths[:-1], 1)
    layout, pairs, rng = network(widths, activations, biased, head, pad)
    batch = 13
    x = rng.standard_normal((batch, widths[0])).astype(np.float32)
    if head == "softmax":
        y = torch.from_numpy(rng.integers(0, widths[-1], batch))
        target = functional.one_hot(y, layout.outputs).float()
    elif head == "regression":
        y = torch.from_numpy(rng.standard_normal((batch, widths[-1])))
        target = y.float()
    else:
        y = torch.from_numpy(rng.integers(0, 2, (batch, widths[-1])).astype(np.float64))
        target = y.float()

    parameters = []
    h = torch.from_numpy(x).double()
    for (weight, bias), name in zip(pairs, activations, strict=True):
        weight = torch.from_numpy(weight.astype(np.float32)).double().requires_grad_()
        bias = None if bias is None else torch.from_numpy(bias.astype(np.float32)).double().requires_grad_()
        parameters.append((weight, bias))
        h = TORCH[name](functional.linear(h, weight, bias))
    loss_of(head, h, y).backward()

    flat = torch.from_numpy(pack(layout, pairs))
    grads = torch.full((layout.size,), 7.0)  # what was there before must not matter
    work = Workspace(layout, batch, torch.device("cpu"))
    with torch.no_grad():
        for _ in range(2):
            gradient(layout, layout.views(flat), augmented(layout, x), target, work, gradients=layout.views(grads))
    for (weight, bias), (grad, bias_grad) in zip(parameters, unpack(layout, grads.numpy()), strict=True):
        np.testing.assert_allclose(grad, weight.grad, rtol=2e-4, atol=2e-6)
        if bias is not None:
            np.testing.assert_allclose(bias_grad, bias.grad, rtol=2e-4, atol=2e-6)
    # silent classes and rows that only fill up get no gradient at all
    inside = torch.zeros(layout.size, dtype=torch.bool)
    for index, view in enumerate(layout.views(inside)):
        view[: widths[index] + biased[index], : widths[index + 1]] = True
    for matrix, mask in zip(layout.views(grads), layout.views(inside), strict=True):
        assert not matrix[~mask].any()


@pytest.mark.parametrize(("widths", "activations", "biased"), SHAPES)
def test_forward_equals_the_mlp_reference(widths, activations, biased):
    layout, pairs, rng = network(widths, activations, biased, pad=True)
    mlp = MLP([Layer(w, b, a) for (w, b), a in zip(pairs, activations, strict=True)])
    x = rng.standard_normal((9, widths[0])).astype(np.float32)
    flat = torch.from_numpy(pack(layout, pairs))
    logits, _ = forward(layout, layout.views(flat), augmented(layout, x), Workspace(layout, 9, torch.device("cpu")))
    out = TORCH[activations[-1]](logits)[:, : widths[-1]]
    np.testing.assert_allclose(out, mlp.reference_logits(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("widths", "activations", "biased"), SHAPES)
@pytest.mark.parametrize("pad", [False, True])
def test_unpack_inverts_pack(widths, activations, biased, pad):
    layout, pairs, _ = network(widths, activations, biased, pad=pad)
    for (weight, bias), (weight_back, bias_back) in zip(pairs, unpack(layout, pack(layout, pairs)), strict=True):
        np.testing.assert_array_equal(weight_back, weight.astype(np.float32))
        assert (bias is None) == (bias_back is None)
        if bias is not None:
            np.testing.assert_array_equal(bias_back, bias.astype(np.float32))


@pytest.mark.parametrize("most", [1, 5, 32])
def test_pieces_are_every_weight_and_every_bias_once(most):
    layout, _, _ = network((7, 300, 5, 3), ("relu", "relu", "identity"), (True, False, True))
    flat = torch.zeros(layout.size)
    weights, biases = layout.pieces(flat, most)
    for piece in [*weights, *biases]:
        assert piece.is_contiguous()
        piece += 1
    expected = torch.zeros(layout.size)
    for index, view in enumerate(layout.views(expected)):
        view[: layout.widths[index] + layout.biased[index]] = 1
    assert torch.equal(flat, expected)
    assert len(weights) <= most + 2 * layout.depth
    assert len(biases) == 2

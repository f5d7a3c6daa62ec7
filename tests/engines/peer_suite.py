"""What both CPU peers must do: float32 against the float64 reference, int8 against a NumPy emulation."""

from __future__ import annotations

import numpy as np
import pytest

import gigamlp as gm
from gigamlp.activations import ACTIVATIONS
from gigamlp.engines.base import Engine
from gigamlp.engines.static_int8 import static_int8
from gigamlp.errors import InvalidInput, ModelError, Unsupported
from gigamlp.mlp import MLP, Layer, Scheme
from gigamlp.quantize import integer_form
from gigamlp.spec import Spec, Variant
from tests.engines.peer_cases import assert_close, calibrated, check_answers, emulate, net, rows

__all__ = ["PeerSuite"]

FLOAT32 = Variant.of(compute="float32")


def _bound(mlp: MLP) -> Variant:
    return Variant.of(compute="int8", hidden="bound" if mlp.hidden else "float", chunk=16)


class PeerSuite:
    """The tests; a file for each engine derives from it."""

    engine: Engine

    # one layer; one feature and one class; odd widths; deep; wider than any vector
    @pytest.mark.parametrize("widths", [(6, 3), (1, 1), (37, 13, 10), (5, 9, 4, 7, 2), (19, 130, 67, 3)])
    @pytest.mark.parametrize("bias", [True, False])
    def test_logits(self, widths, bias):
        check_answers(self.engine, net(*widths, bias=bias), Spec("cpu", 7, output="logits", threads=1), FLOAT32)

    @pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
    def test_activations(self, activation):
        mlp = net(21, 12, 9, 4, activation=activation, last=activation)
        check_answers(self.engine, mlp, Spec("cpu", 7, output="logits", threads=1), FLOAT32)

    # 1; a chunk less one, a chunk, one more; two chunks and a part
    @pytest.mark.parametrize("batch", [1, 15, 16, 17, 37])
    @pytest.mark.parametrize("output", ["class", "margin", "logits", "proba"])
    def test_chunks_of_a_batch(self, batch, output):
        spec = Spec("cpu", batch, output=output, threads=1)
        runner = check_answers(self.engine, net(37, 13, 10), spec, Variant.of(compute="float32", chunk=16))
        assert runner.variant.get("chunk") == min(16, batch)

    @pytest.mark.parametrize("dtype", ["uint8", "int8", "float16", "float32"])
    def test_input_dtypes(self, dtype):
        mlp = net(6, 8, 3, input_scale=np.linspace(0.001, 0.006, 6), input_offset=np.linspace(-1, 1, 6))
        for output in ("logits", "class"):
            check_answers(self.engine, mlp, Spec("cpu", 40, dtype, output, threads=1), FLOAT32)

    @pytest.mark.parametrize(
        ("head", "outputs", "kinds"),
        [
            ("softmax", 1, ("class", "logits", "proba")),
            ("softmax", 2, ("class", "margin", "logits", "proba")),
            ("sigmoid", 1, ("class", "margin", "logits", "proba")),
            ("multilabel", 5, ("logits", "proba")),
            ("regression", 3, ("logits",)),
        ],
    )
    def test_heads(self, head, outputs, kinds):
        for output in kinds:
            check_answers(
                self.engine, net(11, 8, outputs, head=head), Spec("cpu", 40, output=output, threads=1), FLOAT32
            )

    # one run; two; runs that begin and end with the row
    @pytest.mark.parametrize("columns", [((3, 9),), ((1, 4), (6, 9)), ((0, 2), (4, 5), (7, 10))])
    def test_columns(self, columns):
        mlp = net(6, 8, 3, columns=columns, features=10, input_offset=np.arange(6) / 6)
        check_answers(self.engine, mlp, Spec("cpu", 40, output="logits", threads=1), FLOAT32)
        codes = self.engine.build(
            mlp, Spec("cpu", 40, output="logits", threads=1), Variant.of(compute="int8", hidden="bound")
        )
        x = rows(mlp, 40)
        want, slack = emulate(static_int8(mlp, "uint8", "bound"), x)
        assert (np.abs(codes.run(x) - want) <= slack).all()

    def test_ties_go_to_the_lowest_index(self):
        mlp = net(6, 4)
        flat = mlp.with_(layers=[Layer(np.zeros((4, 6)))])
        for variant in self.engine.variants(flat, Spec("cpu", 7), full=True):
            assert self.engine.build(flat, Spec("cpu", 7, threads=1), variant).run(rows(flat, 7)).tolist() == [0] * 7

    @pytest.mark.parametrize("dtype", ["uint8", "int8"])
    @pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
    @pytest.mark.parametrize("widths", [(6, 3), (37, 13, 10), (21, 12, 9, 4)])
    def test_int8_with_bounds(self, widths, activation, dtype):
        mlp = net(*widths, activation=activation)
        form = static_int8(mlp, dtype, "bound")
        runner = self.engine.build(mlp.with_(), Spec("cpu", 33, dtype, "logits", threads=1), _bound(mlp))
        for seed in range(3):
            x = rows(mlp, 33, dtype, seed)
            want, slack = emulate(form, x)
            assert (np.abs(runner.run(x) - want) <= slack).all()
            # the test can fail: the slack is far below the logits, and the codes say something about them
            assert np.median(slack) < 0.1 * np.median(np.abs(want))

    @pytest.mark.parametrize("dtype", ["uint8", "int8"])
    @pytest.mark.parametrize("activation", ["relu", "logistic"])
    def test_int8_with_the_scales_of_a_scheme(self, activation, dtype):
        plain = net(37, 24, 15, 10, activation=activation)
        mlp = calibrated(plain, rows(plain, 500, dtype, 9))
        spec = Spec("cpu", 100, dtype, "logits", threads=1)
        assert next(v.get("hidden") for v in self.engine.variants(mlp, spec)) == "scheme"
        runner = self.engine.build(mlp, spec)
        assert runner.variant.get("hidden") == "scheme"
        x = rows(mlp, 100, dtype)
        want, slack = emulate(static_int8(mlp, dtype, "scheme"), x)
        y = runner.run(x)
        assert (np.abs(y - want) <= slack).all()
        exact = mlp.reference_logits(x)
        assert np.linalg.norm(y - exact) < 0.02 * np.linalg.norm(exact)  # eight bits

    @pytest.mark.parametrize("activation", ["gelu", "tanh", "relu"])
    def test_int8_with_zero_points(self, activation):
        plain = net(37, 24, 15, 10, activation=activation)
        try:
            mlp = calibrated(plain, rows(plain, 500, seed=9), zeros=True)
        except ModelError as error:
            pytest.skip(str(error))  # this version's schemes have no zero points
        x = rows(mlp, 100)
        want, slack = emulate(static_int8(mlp, "uint8", "scheme"), x)
        y = self.engine.build(mlp, Spec("cpu", 100, output="logits", threads=1)).run(x)
        assert (np.abs(y - want) <= slack).all()
        exact = mlp.reference_logits(x)
        assert np.linalg.norm(y - exact) < 0.02 * np.linalg.norm(exact)

    def test_a_scheme_with_the_first_hidden_layer_only(self):
        plain = net(37, 24, 15, 10)
        full = calibrated(plain, rows(plain, 500, seed=9)).scheme.arrays
        mlp = plain.with_(scheme=Scheme("w8a8", {"hidden_scale.0": full["hidden_scale.0"]}))
        form = static_int8(mlp, "uint8", "scheme")
        assert (len(form.layers), len(form.rest)) == (2, 1)
        x = rows(mlp, 50)
        want, slack = emulate(form, x)
        y = self.engine.build(mlp, Spec("cpu", 50, output="logits", threads=1), Variant.of(hidden="scheme")).run(x)
        assert (np.abs(y - want) <= slack).all()

    @pytest.mark.parametrize("dtype", ["uint8", "int8"])
    def test_float_hidden_values_are_scheme_w8(self, dtype):
        # codes of every size, the extremes included: a multiply that saturates at 16 bits would show
        rng = np.random.default_rng(3)
        codes = rng.integers(-127, 128, (24, 301))
        codes[0], codes[1] = 127, -127
        scale = rng.uniform(0.5, 1, 24) / 5000
        layers = [Layer(codes * scale[:, None], rng.normal(size=24), "relu"), Layer(rng.normal(size=(10, 24)))]
        mlp = gm.MLP(layers, scheme=Scheme("w8", {"codes.0": codes, "scale.0": scale}))
        x = rows(mlp, 64, dtype)
        x[0], x[1] = np.iinfo(dtype).max, np.iinfo(dtype).min
        runner = self.engine.build(mlp, Spec("cpu", 64, dtype, "logits", threads=1), Variant.of(compute="int8"))
        assert runner.variant.get("hidden") == "float"
        hidden = integer_form(mlp, dtype).reference_hidden(x).astype(np.float64)
        np.testing.assert_allclose(runner.run(x), hidden @ layers[1].weight.T.astype(np.float64), rtol=2e-5, atol=2e-5)

    def test_saturation_in_a_static_layer(self):
        # the largest sums that two products of bytes can have, in every pair
        layers = [Layer(np.full((3, 64), 1.0), activation="relu"), Layer(np.eye(3))]
        mlp = gm.MLP(layers)
        x = np.full((5, 64), 255, np.uint8)
        y = self.engine.build(
            mlp, Spec("cpu", 5, output="logits", threads=1), Variant.of(compute="int8", hidden="bound")
        ).run(x)
        np.testing.assert_allclose(y, np.full((5, 3), 64 * 255.0), rtol=2**-7)

    # weights so small that the bias does not fit int32 sums; a hidden unit that is never on
    def test_int8_at_the_edges(self):
        layers = [
            Layer(
                np.array([[1e-9, -2e-9], [0.0, 0.0], [-1.0, -1.0], [1.0, 0.5]]), np.array([5.0, 2.0, -1.0, 0.0]), "relu"
            ),
            Layer(np.ones((2, 4)) * [[1.0], [2.0]], [1e6, 0.0]),
        ]
        mlp = gm.MLP(layers)
        x = rows(mlp, 30)
        spec = Spec("cpu", 30, output="logits", threads=1)
        y = self.engine.build(mlp, spec, Variant.of(compute="int8", hidden="bound")).run(x)
        want, slack = emulate(static_int8(mlp, "uint8", "bound"), x)
        assert (np.abs(y - want) <= slack).all()
        assert np.median(slack) < 2
        y = self.engine.build(mlp, spec, Variant.of(compute="int8", hidden="float")).run(x)
        np.testing.assert_allclose(y, mlp.reference_logits(x), rtol=0.01)

    def test_int8_is_offered_only_as_the_scheme_says(self):
        spec = Spec("cpu", 100)

        def hidden(mlp, full=True, spec=spec):
            return {v.get("hidden") for v in self.engine.variants(mlp, spec, full=full) if v.get("compute") == "int8"}

        plain = net(37, 24, 10)
        assert hidden(plain) == {"float", "bound"}
        assert hidden(plain, full=False) == {"float"}
        assert hidden(gm.quantise(plain)) == {"float"}
        assert hidden(calibrated(plain, rows(plain, 100))) == {"scheme", "float"}
        assert hidden(plain.with_(scheme=Scheme("w8a8"))) == {"float"}
        assert hidden(plain, spec=Spec("cpu", 100, "float32")) == set()
        with pytest.raises(Unsupported, match=r"no variant .*hidden=bound.*there are: compute=int8 hidden=float"):
            self.engine.build(gm.quantise(plain), spec, Variant.of(hidden="bound"))

    def test_bind_and_close(self):
        mlp = net(37, 13, 10)
        x = rows(mlp, 20)
        runner = self.engine.build(
            mlp, Spec("cpu", 20, output="logits", threads=1), Variant.of(compute="float32", chunk=8)
        )
        other = runner.bind(x)
        assert other.input is x
        first = other.run(other.input)
        runner.input[...] = 1
        assert_close(runner.run(runner.input), mlp.reference_logits(np.ones((20, 37))))
        assert_close(first, mlp.reference_logits(x))  # outputs are not shared
        runner.close()
        runner.close()
        with pytest.raises(InvalidInput, match="closed"):
            runner.run(x)
        assert_close(other.run(x), mlp.reference_logits(x))

    def test_two_threads(self):
        check_answers(self.engine, net(37, 130, 10), Spec("cpu", 3000, output="logits", threads=2), FLOAT32)

    def test_rows_it_cannot_read(self):
        runner = self.engine.build(net(6, 3), Spec("cpu", 7, threads=1))
        for x in (np.zeros((6, 6), np.uint8), np.zeros((7, 6), np.float32), [[0] * 6] * 7):
            with pytest.raises(InvalidInput, match=r"uint8 \[7, 6\]"):
                runner.run(x)
        with pytest.raises(InvalidInput, match="contiguous"):
            runner.run(np.zeros((7, 12), np.uint8)[:, ::2])

    def test_a_runner_from_before_a_fork_is_refused(self, monkeypatch):
        runner = self.engine.build(net(6, 3), Spec("cpu", 7, threads=1))
        monkeypatch.setattr("os.getpid", lambda: -1)
        with pytest.raises(InvalidInput, match="before a fork"):
            runner.run(runner.input)

    def test_what_it_cannot_do(self):
        mlp = net(6, 8, 3)
        for m, spec, word in (
            (mlp, Spec("cuda:0", 7), "CPU only"),
            (mlp, Spec("cpu", 7, "bfloat16"), "bfloat16"),
            (net(6, 3, head="multilabel"), Spec("cpu", 7), "no single class"),
            (net(6, 1), Spec("cpu", 7, output="margin"), "no margin"),
            (net(6, 3, head="regression"), Spec("cpu", 7, output="proba"), "no probabilities"),
        ):
            with pytest.raises(Unsupported, match=word):
                self.engine.build(m, spec)
        with pytest.raises(InvalidInput, match=r"unknown options op; known: .*compute, hidden, chunk"):
            self.engine.build(mlp, Spec("cpu", 7), Variant.of(op="fast"))
        for chunk in (0, True, "8"):
            with pytest.raises(InvalidInput, match="chunk must be"):
                self.engine.build(mlp, Spec("cpu", 7), Variant.of(chunk=chunk))

    def test_it_is_a_candidate_and_the_gate_judges_it(self):
        mlp = net(37, 24, 10)
        plan = gm.optimize(mlp, device="cpu", batch=64, engines=[self.engine.name], threads=1)
        assert plan.winners[0].engine == self.engine.name
        assert plan.winners[0].variant.get("compute") == "float32"
        rejected = [c for c in plan.candidates if c.variant.get("compute") == "int8"]
        assert rejected
        assert all("logits differ" in c.rejected for c in rejected)
        with gm.Session(mlp, plan) as session:
            x = rows(mlp, 150)
            np.testing.assert_array_equal(session.predict(x), mlp.predict(x))

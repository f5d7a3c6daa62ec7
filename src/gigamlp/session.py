"""The Session: an MLP and a Plan that answer any number of rows, from any kind of memory, with owned answers."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from gigamlp.cascade import Cascade, Model
from gigamlp.choice import Choice
from gigamlp.errors import DeviceError, InvalidInput
from gigamlp.hosted import run_from_host
from gigamlp.inputs import Rows, as_rows, is_plain, value_check
from gigamlp.mlp import MLP
from gigamlp.outputs import allocate, check_out, destination, label_tensor
from gigamlp.plan import Plan
from gigamlp.routes import Routes
from gigamlp.runners import Runners
from gigamlp.single import direct_call
from gigamlp.spec import Variant
from gigamlp.unplanned import choose
from gigamlp.unsure import unsure_of

__all__ = ["Session"]

Array = NDArray[Any]


class Session:
    """Run an MLP or Cascade on any number of rows. Of a cascade, `unsure` counts the rows that went on.

    Rows may be NumPy, torch (CPU or CUDA), tables of pandas, polars or pyarrow, anything with DLPack, or what
    ``np.asarray`` reads. The answers are of the same kind, on the same device and stream, in memory that the caller
    owns: a later call never changes them. Tables and DLPack rows on the host give NumPy, DLPack rows on CUDA torch.

    Parameters
    ----------
    mlp : MLP or Cascade
    plan : Plan, optional
        From `gigamlp.optimize`. Without one, and without `engine`, `variant`, `batch` and `threads`, what
        `gigamlp.optimize` kept for this model on this machine runs; for what it did not measure, ``torch_eager`` in
        float32 if torch is installed, else ``numpy``. `explain` says which.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``. ``"auto"`` is the Plan's device, else a GPU if there is one.
    engine : str, optional
        Without a Plan: run this engine. It is an error if it cannot run.
    variant : Variant or dict, optional
        Without a Plan: the engine's options.
    batch : int or sequence of int, optional
        Without a Plan: the batch sizes that rows are cut into.
    input_dtype : str, optional
        Run all rows in this dtype. Rows are rounded to float16, bfloat16 or float32; uint8 and int8 take whole numbers
        in range only. Default: the rows' own dtype, or one that holds all its values.
    threads : int, optional
        Without a Plan: CPU threads.
    check_finite : bool, optional
        Whether rows are searched for NaN, infinities and numbers beyond the range of the dtype they run in. Default:
        rows on the host are, rows on CUDA are not, as that has to wait for the device.
    retune : bool
        If the Plan was made for another model, machine or version, tune again (seconds to minutes) instead of refusing.
    cache : bool
        Without a Plan: whether kept Plans are looked for.

    Attributes
    ----------
    mlp : MLP
    device : str
    routes : Routes
        Which engines answer which rows.
    plain : bool
        Whether class labels are the class ids.

    Raises
    ------
    PlanMismatch
        If the Plan does not hold for this MLP or machine.
    Unsupported
        If a named engine cannot run here.
    DeviceError, InvalidInput
        If an argument cannot be used.

    Notes
    -----
    Threads may share a Session; batches are then run one at a time. Rows on the host are done when a call returns. Rows
    on CUDA are queued on the current stream and nothing is waited for.

    int32, int64 and float64 rows run as float32: whole numbers beyond 2**24 and float64 are rounded to the nearest
    float32.

    Examples
    --------
    >>> import numpy as np, gigamlp as gm
    >>> mlp = gm.MLP([gm.Layer([[1.0, 0.0], [0.0, 1.0]])], classes=["left", "right"])
    >>> with gm.Session(mlp, device="cpu") as session:
    ...     session.predict(np.array([[3, 1], [1, 3], [9, 0]], dtype=np.uint8))
    array(['left', 'right', 'left'], dtype='<U5')
    """

    def __init__(
        self,
        mlp: Model,
        plan: Plan | None = None,
        *,
        device: str = "auto",
        engine: str | None = None,
        variant: Variant | Mapping[str, Any] | None = None,
        batch: int | Sequence[int] | None = None,
        input_dtype: str | None = None,
        threads: int | None = None,
        check_finite: bool | None = None,
        retune: bool = False,
        cache: bool = True,
    ) -> None:
        if not isinstance(mlp, MLP | Cascade):
            raise InvalidInput(
                f"a Session runs an MLP or Cascade, not a {type(mlp).__name__}; gigamlp.load reads a file"
            )
        if plan is not None and not isinstance(plan, Plan):
            raise InvalidInput(f"plan must be a Plan or None, got a {type(plan).__name__}; Plan.load reads a file")
        self.mlp = mlp
        own = {"engine": engine, "variant": variant, "batch": batch, "threads": threads}
        self._choice: Choice = choose(mlp, plan, device, **own, retune=retune, cache=cache)  # type: ignore[arg-type]
        self.device: str = self._choice.device
        self.routes = Routes(self._choice, input_dtype)
        self._check_finite = check_finite
        self._by_torch = any(name.startswith("torch_") for name in self._choice.engines)
        self._runners = Runners(mlp, self.device, self._choice.ranges)
        self._near = Runners(mlp, "cpu", self._choice.ranges)  # what reads host rows where they are, beside a GPU
        self._labels: dict[str, Any] = {}  # the class labels as a tensor, per device
        self.plain = mlp.classes is None or bool(np.array_equal(mlp.classes, np.arange(len(mlp.classes))))
        self._pid = os.getpid()
        self.unsure = unsure_of(mlp, (self._runners, self._near))

    # ---- answers --------------------------------------------------------------------------------------------------

    def predict(self, x: Any, *, out: Any = None) -> Any:
        """Return the answer for each row of `x`.

        Parameters
        ----------
        x : array_like, shape [n, features]
        out : array or tensor of the kind and device of `x`, optional
            Where the answers go, of exactly their shape and dtype; it is returned. Without it they are new memory. If
            rows of the host are refused on CUDA (NaN, say), batches before theirs may have been answered.

        Returns
        -------
        ndarray or torch.Tensor
            Class labels [n] for ``softmax`` and ``sigmoid``, int64 indicators [n, outputs] for ``multilabel``, float32
            [n] or [n, outputs] for ``regression``.

        Raises
        ------
        InvalidInput
            If the rows or `out` cannot be used, or the labels are strings and the rows are a tensor: use `class_ids`.
        """
        rows, mlp = self._rows(x), self.mlp
        n, k = len(rows), mlp.outputs
        if mlp.head == "regression":
            answers = destination(out, rows, (n,) if k == 1 else (n, k), "float32")
            self._run(rows, "logits", answers[:, None] if k == 1 else answers)
            return answers
        if mlp.head == "multilabel":
            answers = destination(out, rows, (n, k), "int64")
            answers[...] = self._run(rows, "logits", allocate(rows, (n, k), "float32")) > 0
            return answers
        assert mlp.classes is not None  # the other heads have classes
        if rows.kind == "torch" and mlp.classes.dtype.kind in "US":
            raise InvalidInput("class labels are strings, which a tensor cannot hold: use class_ids(x), or NumPy rows")
        dtype = "int64" if rows.kind == "torch" else mlp.classes.dtype.str
        if self.plain:
            return self._run(rows, "class", destination(out, rows, (n,), dtype))
        if out is not None:
            check_out(out, rows, (n,), dtype)
        ids = self._run(rows, "class", allocate(rows, (n,), "int64"))
        labels = mlp.classes[ids] if rows.kind == "numpy" else label_tensor(mlp.classes, ids, self._labels)[ids]
        if out is None:
            return labels
        out[...] = labels
        return out

    def predict_one(self, row: Any) -> Any:
        """Return the answer for one row: what ``predict(row[None])[0]`` is, with next to nothing around the engine.

        Engine ``cpu_fused``, and ``cuda_fused`` where the Plan sends single host rows to it, answer a uint8 or int8 row
        without a copy or a check of more than its type and length. Threads may call it at the same time.

        Parameters
        ----------
        row : array_like, shape [features]

        Returns
        -------
        int, str, or what `predict` gives for a row
            The class label as a Python object.

        Examples
        --------
        >>> import numpy as np, gigamlp as gm
        >>> mlp = gm.MLP([gm.Layer([[1.0, 0.0], [0.0, 1.0]])], classes=["left", "right"])
        >>> with gm.Session(mlp, device="cpu", engine="numpy") as session:
        ...     session.predict_one(np.array([3, 1], dtype=np.uint8))
        'left'
        """
        if "predict_one" in self.__dict__:  # the caller keeps this method from before the first call
            return self.__dict__["predict_one"](row)
        if isinstance(row, np.ndarray) and row.ndim == 1:
            one = self._find_one(row)
            if one is not None:  # from now on callers reach the engine's own call, with nothing of Python in between
                self.__dict__["predict_one"] = one
        return self._predict_one(row)

    def _predict_one(self, row: Any) -> Any:
        answer = self.predict(row[None] if hasattr(row, "ndim") else [row])[0]
        return answer.item() if getattr(answer, "ndim", 1) == 0 else answer

    def _find_one(self, row: Array) -> Any:
        """Return the engine's own call for a row like `row`, or None if it has none."""
        self._check_alive()
        dtype = self.routes.asked or row.dtype.name
        if self.mlp.head not in ("softmax", "sigmoid"):
            return None
        near = self.routes.host_ladder(dtype, "class")
        if dtype != row.dtype.name or dtype not in self._choice.dtypes or (near is None and self.device != "cpu"):
            return None
        runners, ladder = (
            (self._near, near) if near is not None else (self._runners, self.routes.ladder(dtype, "class"))
        )
        return direct_call(self.mlp, runners, ladder.cut(1)[0].rung, weakref.WeakMethod(self._predict_one))

    def class_ids(self, x: Any, *, out: Any = None) -> Any:
        """Return the int64 class index [n] of each row of `x`; ties go to the lowest index. See `predict` for `out`."""
        rows = self._rows(x)
        if self.mlp.head not in ("softmax", "sigmoid"):
            raise InvalidInput(f"head {self.mlp.head!r} has no single class per row; use predict or logits")
        return self._run(rows, "class", destination(out, rows, (len(rows),), "int64"))

    def predict_proba(self, x: Any, *, out: Any = None) -> Any:
        """Return float32 probabilities [n, classes] of the rows of `x`; not for ``regression``.

        See `predict` for `out`.
        """
        rows, mlp = self._rows(x), self.mlp
        if mlp.head == "regression":
            raise InvalidInput("head 'regression' has no probabilities; use predict or logits")
        width = 2 if mlp.head == "sigmoid" else mlp.outputs
        return self._run(rows, "proba", destination(out, rows, (len(rows), width), "float32"))

    def logits(self, x: Any, *, out: Any = None) -> Any:
        """Return float32 logits [n, outputs] of the rows of `x`, whatever dtype the engine computes in.

        See `predict` for `out`.
        """
        rows = self._rows(x)
        return self._run(rows, "logits", destination(out, rows, (len(rows), self.mlp.outputs), "float32"))

    # ---- words ----------------------------------------------------------------------------------------------------

    def explain(
        self,
        rows: int | None = None,
        *,
        input_dtype: str | None = None,
        output: str = "class",
        input_on: str = "device",
    ) -> str:
        """Say what runs: for `rows` rows the exact cut, else all batches there are.

        Parameters
        ----------
        rows : int, optional
        input_dtype : str, optional
            Default: all that the Session runs.
        output : {"class", "margin", "logits", "proba"}
            ``class`` means ``logits`` for heads that have no class.
        input_on : {"device", "host"}
            Where the rows are. For rows on the host, other batches may run if the Plan measured them from there.

        Examples
        --------
        >>> import gigamlp as gm
        >>> mlp = gm.MLP([gm.Layer([[1.0, 0.0], [0.0, 1.0]])], name="toy")
        >>> with gm.Session(mlp, device="cpu", engine="numpy", batch=(1, 64)) as session:
        ...     print(session.explain(129, input_dtype="uint8"))
        Session for 'toy' on cpu; engine 'numpy', as asked for
        uint8 -> class, 129 rows:
          2 x batch 64    numpy op=matmul compute=float32
          1 x batch 1     numpy op=matmul compute=float32
        """
        if rows is not None and rows < 0:
            raise InvalidInput(f"rows must be >= 0, got {rows}")
        if output == "class" and self.mlp.head not in ("softmax", "sigmoid"):
            output = "logits"
        lines = [f"Session for {self.mlp.name!r} on {self.device}; {self._choice.title}"]
        asked = input_dtype or self.routes.asked
        for dtype in (asked,) if asked else self._choice.dtypes:
            ladder = (self.routes.host_ladder(dtype, output) if input_on == "host" else None) or self.routes.ladder(
                dtype, output
            )
            lines.append(f"{dtype} -> {output}{'' if rows is None else f', {rows:,} rows'}:")
            lines += ladder.explain(rows)
        return "\n".join(lines)

    def __repr__(self) -> str:
        state = ", closed" if self._runners.closed else ""
        return f"Session({self.mlp!r}, device={self.device!r}, {self._choice.title}{state})"

    # ---- life -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free all buffers and graphs, once the work that uses them is done. Closing twice is no error."""
        if os.getpid() == self._pid:
            self._runners.close()
            self._near.close()
        self._runners.closed = self._near.closed = True
        self.__dict__.pop("predict_one", None)
        self._labels.clear()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise InvalidInput(
            "a Session cannot be pickled or copied: it holds buffers, graphs and locks of this process. Send the MLP "
            "and the Plan (both can be pickled; mlp.save and plan.save write files), and make a Session of them there"
        )

    def _check_alive(self) -> None:
        if self._runners.closed:
            raise InvalidInput("this session is closed; make a new Session")
        if os.getpid() == self._pid:
            return
        if self.device != "cpu":
            raise DeviceError(
                f"this session on {self.device} was made in process {self._pid}, and CUDA does not survive a fork: "
                "make the Session in the child process, and start that with multiprocessing's 'spawn' method"
            )
        self._pid = os.getpid()
        self._runners.renew_lock()
        torch = sys.modules.get("torch")
        if torch is not None:  # the threads of its pool stayed in the parent, and waiting for them would never end
            torch.set_num_threads(1)

    # ---- rows in --------------------------------------------------------------------------------------------------

    def _rows(self, x: Any) -> Rows:
        self._check_alive()
        rows = as_rows(x, self.mlp)
        if rows.device not in ("cpu", self.device):
            raise InvalidInput(
                f"rows are on {rows.device}, but this session runs on {self.device}: pass x.to({self.device!r}), or "
                f"make a Session(..., device={rows.device!r})"
            )
        return rows

    def _run(self, rows: Rows, output: str, answers: Any) -> Any:
        """Fill `answers` (of the kind and device of `rows`) and return it."""
        dtype = self.routes.dtype(rows)
        finite = rows.device == "cpu" if self._check_finite is None else self._check_finite
        check = value_check(rows, dtype, self.mlp, finite=finite, by_torch=self._by_torch)
        near = self.routes.host_ladder(dtype, output) if rows.device == "cpu" else None
        pieces = (near or self.routes.ladder(dtype, output)).cut(len(rows))
        if not pieces:
            return answers
        if self.unsure is not None:
            self.unsure.start(rows.device == "cpu")
        x = rows.data
        ready = rows.dtype == dtype and is_plain(x)
        if check is not None and (near is not None or rows.device != "cpu" or self.device == "cpu"):
            check(0, len(rows))
        if rows.device != "cpu":
            self._runners.on_device(x, ready, pieces, answers)
            return answers
        host = answers if isinstance(answers, np.ndarray) else answers.numpy()
        target = host if is_plain(host) else np.empty(host.shape, host.dtype)
        if near is not None:
            run_from_host(self._near, self._runners, x, ready, pieces, target)
        elif self.device == "cpu":
            self._runners.on_host(x, ready, pieces, target)
        else:
            self._runners.through_pinned(x, pieces, target, check)
        if target is not host:
            host[...] = target
        return answers

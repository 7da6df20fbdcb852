"""Captures on disk: against the pass alone, against loops that people write, and slices against a plain pread.

SAELens' cache runner is compared where SAELENS_PYTHON names the interpreter of an environment that has it (SAELens 6
wants transformer-lens below 4, so it cannot share ours); it then caches one hook of a transformer of the same shape.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from t2lens.bench.timing import Ratio, paired
from t2lens.config import MLP, Attention, ModelConfig, ResidualConfig
from t2lens.model import Transformer, build
from t2lens.residual import AttnRes, DeepDelta, Standard
from t2lens.store import Store, make_run, run_shards

__all__ = ["bench_store"]

_OWN = ["depth weights", "gates", "residual norms"]
_N_POS, _BATCH = 128, 8


def bench_store(pairs: int = 21, n_sequences: int = 64, d_model: int = 256) -> Iterator[Ratio]:
    """8 blocks on sequences of 128 tokens; a third of the pairs where each takes seconds."""
    few = max(2, pairs // 3)
    with tempfile.TemporaryDirectory(prefix="t2lens-bench-") as folder:
        work = Path(folder)
        ids = np.random.default_rng(0).integers(0, 1024, (n_sequences, _N_POS))
        np.save(work / "ids.npy", ids)
        tokens = torch.from_numpy(ids)
        for name, residual in (("attnres-full", AttnRes()), ("ddl", DeepDelta())):
            model = _model(residual, d_model)
            label = f"{name}, d={d_model}, {ids.size} tokens: "
            yield paired(
                label + "capture depth weights, gates, norms / pass alone",
                _capturing(model, work, _OWN, None),
                lambda model=model: _pass(model, tokens),
                pairs=few,
                bound=1 / 0.9,
            )
        model = _model(AttnRes(), d_model)
        hooks = [f"blocks.{i}.hook_read_{sublayer}" for i in range(1, 7) for sublayer in ("attn", "mlp")]
        label = f"attnres-full, d={d_model}, {ids.size} tokens: 12 residual hooks in bf16, capture / "
        capturing = _capturing(model, work, hooks, "bfloat16")
        yield paired(label + "pass alone", capturing, lambda: _pass(model, tokens), pairs=few, bound=1 / 0.7)
        loop = _torch_save_loop(model, tokens, hooks, work)
        yield paired(label + "run_with_cache and torch.save", capturing, loop, pairs=few, bound=1.0)
        yield _slices(model, work, pairs)
        if "SAELENS_PYTHON" in os.environ:
            yield from _saelens(os.environ["SAELENS_PYTHON"], work, d_model, tokens, few)


def _model(residual: ResidualConfig, d_model: int) -> Transformer:
    cfg = ModelConfig(
        d_vocab=1024,
        n_ctx=_N_POS,
        d_model=d_model,
        n_layers=8,
        attention=Attention(n_heads=d_model // 32, n_kv_heads=d_model // 32, d_head=32),
        mlp=MLP(d_mlp=3 * d_model),
        residual=residual,
    )
    return build(cfg, seed=0)


@torch.inference_mode()
def _pass(model: Transformer, tokens: Tensor) -> None:
    for start in range(0, len(tokens), _BATCH):
        model(tokens[start : start + _BATCH])


def _capturing(model: Transformer, work: Path, what: Sequence[str], dtype: str | None) -> Callable[[], None]:
    """Every shard of a run, written and synced; the plan is there already."""
    options: dict[str, Any] = {"n_pos": _N_POS, "dtype": dtype, "batch_size": _BATCH, "sequences_per_shard": 2 * _BATCH}
    run = make_run(model, work / "ids.npy", work / "runs", what, **options, threads=torch.get_num_threads())

    def capture() -> None:
        shutil.rmtree(run / "shards")
        for _ in run_shards(model, run):
            pass

    return capture


def _torch_save_loop(model: Transformer, tokens: Tensor, hooks: list[str], work: Path) -> Callable[[], None]:
    out = work / "loop"
    out.mkdir()

    @torch.inference_mode()
    def loop() -> None:
        for start in range(0, len(tokens), _BATCH):
            _, cache = model.run_with_cache(tokens[start : start + _BATCH], names_filter=hooks)
            torch.save({name: cache[name].to(torch.bfloat16) for name in hooks}, out / f"{start}.pt")

    return loop


def _slices(model: Transformer, work: Path, pairs: int) -> Ratio:
    """16 positions of one sequence and one tensor, at random places, against pread of the same bytes into a tensor."""
    run = make_run(model, work / "ids.npy", work / "runs", ["reads"], n_pos=_N_POS, sequences_per_shard=8)
    for _ in run_shards(model, run):
        pass
    store = Store(run)
    dice, keys = np.random.default_rng(0), [key for key in store if key != "hook_read_final"]
    asked = [
        (keys[k], int(i), int(a)) for k, i, a in dice.integers(0, [len(keys), len(store["tokens"]), 112], (500, 3))
    ]
    d_model = model.cfg.d_model
    handles, places = {}, []
    for key, i, a in asked:
        ranged = store[key][i, a : a + 16]
        shard, row = divmod(i, store.plan.sequences_per_shard)
        file = run / "shards" / f"{shard:06d}.safetensors"
        if shard not in handles:
            handles[shard] = os.open(file, os.O_RDONLY)
        size = int.from_bytes(os.pread(handles[shard], 8, 0), "little")
        begin = json.loads(os.pread(handles[shard], size, 8))[key]["data_offsets"][0]
        at = 8 + size + begin + (row * _N_POS + a) * d_model * 4
        places.append((handles[shard], at))
        assert torch.equal(_raw(handles[shard], at, 64 * d_model, d_model), ranged)

    def sliced() -> None:
        for key, i, a in asked:
            store[key][i, a : a + 16]

    def plain() -> None:
        for handle, at in places:
            _raw(handle, at, 64 * d_model, d_model)

    name = f"random slices of 16 positions, {64 * d_model} bytes each / pread"
    try:
        return paired(name, sliced, plain, pairs=pairs, bound=2.0)
    finally:
        for handle in handles.values():
            os.close(handle)


def _raw(handle: int, at: int, n: int, d_model: int) -> Tensor:
    return torch.frombuffer(bytearray(os.pread(handle, n, at)), dtype=torch.float32).reshape(-1, d_model)


def _saelens(python: str, work: Path, d_model: int, tokens: Tensor, pairs: int) -> Iterator[Ratio]:
    """One hook in float32, as SAELens stores it: our capture against its runner, each with a model of its own, and each
    against the pass of that model alone."""
    model = _model(Standard(), d_model)
    script = Path(__file__).with_name("saelens_peer.py")
    shape = [str(n) for n in (d_model, model.cfg.n_layers, 3 * d_model, _N_POS, _BATCH)]
    command = [python, "-I", str(script), str(work / "ids.npy"), str(work / "saelens"), *shape]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdin is not None and peer.stdout is not None

        def ask(what: str) -> None:
            print(what, file=peer.stdin, flush=True)
            while (line := peer.stdout.readline().strip()) != "t2lens: done":  # type: ignore[union-attr]
                if not line and peer.poll() is not None:
                    raise ValueError(f"SAELENS_PYTHON={python} could not run SAELens; see above.")

        ask("hello")
        label = f"plain residual, d={d_model}, {tokens.numel()} tokens, one hook in float32: "
        ours = _capturing(model, work, ["blocks.7.hook_resid_pre"], None)
        yield paired(label + "capture / pass alone", ours, lambda: _pass(model, tokens), pairs=pairs)
        yield paired(label + "SAELens / its pass alone", lambda: ask("cache"), lambda: ask("pass"), pairs=pairs)
        yield paired(label + "capture / SAELens", ours, lambda: ask("cache"), pairs=pairs, bound=1.0)
        peer.stdin.close()

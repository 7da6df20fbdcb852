"""What hooks cost, measured in a process of its own: prints one JSON object of ratios to a plain forward pass.

Times are CPU time of one thread; the variants take turns and are compared within each turn.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import statistics
import sys
import textwrap
import time
from collections.abc import Callable

import torch
from torch import Tensor

import t2lens
from t2lens import model as model_module
from t2lens.config import Attention, ModelConfig, SwiGLU
from t2lens.model import Transformer
from t2lens.residual import AttnRes, DeepDelta, Standard, attnres, base, deep_delta
from t2lens.sublayers import attention, mlp, norms

SYSTEMS = {"standard": Standard(), "attnres": AttnRes(), "ddl": DeepDelta()}


def build(system: str, width: int) -> Transformer:
    heads = Attention(n_heads=4, n_kv_heads=2, d_head=width // 4, qk_norm=True)
    cfg = ModelConfig(
        d_vocab=512,
        n_ctx=128,
        d_model=width,
        n_layers=8,
        attention=heads,
        mlp=SwiGLU(d_mlp=8 * width // 3),
        residual=SYSTEMS[system],
    )
    return t2lens.build(cfg)


class _Strip(ast.NodeTransformer):
    """hook(x) -> x, for every call of a hook point: `self.hook_q(x)`, `hook_points[name](x)`, `hook("beta")(x)`."""

    count = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called = node.func.value if isinstance(node.func, ast.Subscript) else node.func
        if isinstance(called, ast.Call):
            is_hook = isinstance(called.func, ast.Name) and called.func.id == "hook"
        else:
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            is_hook = name.startswith("hook_")
        if is_hook and len(node.args) == 1 and not node.keywords:
            self.count += 1
            return node.args[0]
        return node


@functools.cache  # read once: a source file that changes meanwhile would not fit
def bare_functions() -> list[tuple[type, str, Callable]]:
    """(class, method, the same method without its hook points) for every method that calls one."""
    bare = []
    for module in (attention, mlp, norms, model_module, base, attnres, deep_delta):
        for owner in {c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__}:
            for name, function in vars(owner).items():
                if not inspect.isfunction(function) or function.__code__.co_filename != module.__file__:
                    continue
                strip = _Strip()
                tree = ast.fix_missing_locations(strip.visit(ast.parse(textwrap.dedent(inspect.getsource(function)))))
                if strip.count:
                    scope = dict(vars(module))
                    exec(compile(tree, module.__name__, "exec"), scope)
                    bare.append((owner, name, scope[name]))
    assert len(bare) >= 7, "the stripped model would not be the whole model"
    return bare


def ratios(base: Callable[[], object], others: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median over rounds of the time of each variant over that of `base` in the same round."""
    variants = {"base": base, **others}
    found: dict[str, list[float]] = {name: [] for name in others}
    for turn in range(rounds + 1):
        order = list(variants) if turn % 2 else list(variants)[::-1]
        times = {}
        for name in order:
            start = time.thread_time()
            variants[name]()
            times[name] = time.thread_time() - start
        if turn:  # the first round warms up
            for name in others:
                found[name].append(times[name] / times["base"])
    return {name: statistics.median(each) for name, each in found.items()}


def idle_cost(system: str, width: int, batch: int, n: int, rounds: int) -> float:
    """Time of a plain pass over that of the same pass without hook points."""
    model, tokens = build(system, width), torch.randint(512, (batch, n))
    bare = bare_functions()
    full = [(owner, name, vars(owner)[name]) for owner, name, _ in bare]

    def run(functions: list[tuple[type, str, Callable]]) -> Tensor:
        for owner, name, function in functions:
            setattr(owner, name, function)
        return model(tokens)

    try:
        assert torch.equal(run(bare), run(full))
        run(bare)
        left = model.run_with_cache(tokens, names_filter=lambda name: True)[1]
        # These two are not called in a plain pass: attention makes a pattern only when someone looks at it.
        assert all(name.endswith(("hook_attn_scores", "hook_pattern")) for name in left), "not all points were stripped"
        return ratios(lambda: run(bare), {"full": lambda: run(full)}, rounds)["full"]
    finally:
        run(full)


def capture_costs(system: str, rounds: int) -> dict[str, float]:
    model, tokens = build(system, 256), torch.randint(512, (4, 128))
    small = [n for n in model.hook_dict if "hook_depth_attn" in n or n.endswith(("hook_beta", "hook_scale"))]
    return ratios(
        lambda: model(tokens),
        {
            "everything": lambda: model.run_with_cache(tokens),
            "weights, gates and norms": lambda: model.run_with_cache(tokens, names_filter=small),
        },
        rounds,
    )


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        for system in SYSTEMS:
            found[system] = {
                "idle, width 64": idle_cost(system, 64, 1, 16, 10 * rounds),
                "idle, width 256": idle_cost(system, 256, 4, 128, rounds),
                **capture_costs(system, rounds),
            }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12)

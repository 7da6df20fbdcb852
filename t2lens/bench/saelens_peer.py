"""SAELens' cache runner, asked through standard input; run by the interpreter of an environment that has SAELens.

Arguments: an .npy file of token ids, a folder for its output, d_model, layers, d_mlp, positions, batch size. Answers
each line ("hello", "cache", "pass") when it is done. Nothing of t2lens is imported here.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

DONE = "t2lens: done"
HOOK = "blocks.7.hook_resid_pre"


def serve(ids_file: str, out: str, d_model: int, n_layers: int, d_mlp: int, n_pos: int, batch_size: int) -> None:
    import sae_lens.cache_activations_runner as saelens  # type: ignore[import-not-found]
    import torch
    from datasets import Dataset
    from sae_lens.load_model import HookedTransformer  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    ids = torch.from_numpy(np.load(ids_file))
    shape: dict[str, Any] = {"d_model": d_model, "n_layers": n_layers, "d_mlp": d_mlp, "n_ctx": n_pos}
    heads: dict[str, Any] = {"n_heads": d_model // 32, "d_head": 32, "positional_embedding_type": "rotary"}
    heads |= {"rotary_dim": 32, "d_vocab": 1024, "act_fn": "silu", "gated_mlp": True, "normalization_type": "RMS"}
    model = HookedTransformer(shape | heads | {"device": "cpu", "seed": 0})
    saelens.load_model = lambda **_: model
    dataset = Dataset.from_dict({"tokens": ids.tolist()})

    def runner() -> Any:
        shutil.rmtree(out, ignore_errors=True)
        cfg = saelens.CacheActivationsRunnerConfig(
            dataset_path="none",
            model_name="none",
            model_batch_size=batch_size,
            hook_name=HOOK,
            d_in=d_model,
            training_tokens=ids.numel(),
            context_size=n_pos,
            new_cached_activations_path=out,
            shuffle=False,
            dtype="float32",
            device="cpu",
            buffer_size_gb=ids.numel() * d_model * 4 / 1e9,  # all that is cached, in one buffer
            prepend_bos=False,
        )
        return saelens.CacheActivationsRunner(cfg, override_dataset=dataset)

    ready = runner()
    for line in sys.stdin:
        if line.strip() == "cache":
            assert len(ready.run()) == len(ids)
        elif line.strip() == "pass":
            with torch.inference_mode():
                for start in range(0, len(ids), batch_size):
                    model(ids[start : start + batch_size], stop_at_layer=8)
        print(DONE, flush=True)  # noqa: T201
        if line.strip() == "cache":  # what comes next is not timed
            ready = runner()


if __name__ == "__main__":
    file, folder, *numbers = sys.argv[1:]
    assert Path(file).is_file()
    serve(file, folder, *map(int, numbers))

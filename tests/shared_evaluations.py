"""What test_data_parallel.py evaluates alone, and in several processes."""

import json
import os
from pathlib import Path

from fc_eval.collective.comm import BASELINE
from fc_eval.collective.ranks import Ranks
from fc_eval.evaluate.processes import Processes, joined
from fc_eval.evaluate.run import evaluate
from fc_eval.evaluate.spec import PerplexitySpec, TaskSpec
from fc_eval.models.config import Shape
from fc_eval.models.tiny import byte_tokenizer, tiny_model
from fc_eval.parallel.emulate import communicate

# Hidden 192 is 1.5 groups of 128; the other has SmolLM2's widths, 9 heads and 3 key/value heads.
MODELS = {
    "tiny": (Shape(layers=2, hidden=192, intermediate=384, heads=8, kv_heads=4), 2, "int4"),
    "smollm2": (Shape(layers=2, hidden=576, intermediate=1536, heads=9, kv_heads=3), 3, "int6-g32"),
}
TASKS = ("sampled", "whole")
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{text}"
doc_to_target: "{{{{a}}}}"
{extra}
metadata: {{version: 1.0}}
"""
SAMPLED = """
generation_kwargs: {until: ["\\n"], max_gen_toks: 4, do_sample: true, temperature: 1.0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
WORDS = "metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]"


def write_tasks(folder: Path) -> None:
    """A text for windows; and five documents, once to be continued by sampling, once to be scored as a whole."""
    (folder / "own.txt").write_text("".join(f"Line {i} of a text that is soon tokenized.\n" for i in range(20)))
    file = folder / "own.jsonl"
    file.write_text("\n".join(json.dumps({"q": f"Question {i}" * i, "a": "word " * (9 * i + 1)}) for i in range(5)))
    for name, kind, text, extra in (
        ("sampled", "generate_until", "{{q}}?", SAMPLED),
        ("whole", "loglikelihood_rolling", "", WORDS),
    ):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, kind=kind, file=file, text=text, extra=extra))


def everything(folder: Path, processes: Processes) -> dict[str, object]:
    """Every kind of evaluation, in a form that compares bit by bit; with it what the all-reduces were counted as."""
    import torch

    # By name: how many there are, windows per batch, and whether divergence is asked for.
    windows = {"uneven": (7, 2, False), "fewer": (1, 1, True), "diverging": (5, 1, True)}
    text = str(folder / "own.txt")
    specs = [PerplexitySpec(name, "text", 33, path=text, limit=limit) for name, (limit, _, _) in windows.items()]
    tasks = [TaskSpec("everyday", "everyday", limit=5), *(TaskSpec(n, str(folder / f"{n}.yaml")) for n in TASKS)]
    found: dict[str, object] = {}
    for model_name, (shape, tp, comm) in MODELS.items():
        model = tiny_model(shape, dtype=torch.bfloat16)
        for spec in specs + (tasks if model_name == "tiny" else []):
            _, window_batch, diverging = windows.get(spec.name, (0, 1, False))
            seen: list[tuple[int, int]] = []
            with communicate(model, comm, tp, "reference") as attachment:
                result = evaluate(
                    model,
                    byte_tokenizer(),
                    spec,
                    data_root=None,
                    add_bos_token=True,
                    batch_size=3,
                    window_batch=window_batch,
                    as_baseline=(lambda a=attachment: a.using(BASELINE)) if diverging else None,
                    progress=lambda *x, seen=seen: seen.append(x),
                    processes=processes,
                )
                attachment.set_counts(processes.gather(attachment.counts()))
                attachment.check_calls()
                stats = attachment.stats()
            assert seen == sorted(seen)
            arrays = {key: (str(a.dtype), a.shape, a.tobytes()) for key, a in (result.arrays or {}).items()}
            last = [progress for progress in seen if progress[0] == progress[1]]
            found[f"{model_name} {spec.name}"] = {
                "metrics": result.metrics,
                "rows": result.rows,
                "protocol": result.protocol,
                "samples": (result.samples, result.partial),
                "arrays": arrays,
                "stats": stats,
                "progress": last,
            }
    return found


def everything_shared(ranks: Ranks, folder: Path) -> dict[str, object]:
    """`everything` in one of several processes, joined as those that torchrun starts."""
    mine = {"RANK": ranks.rank, "LOCAL_RANK": ranks.rank, "WORLD_SIZE": ranks.world_size}
    os.environ |= {key: str(value) for key, value in (mine | {"LOCAL_WORLD_SIZE": ranks.world_size}).items()}
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(folder / f"cache{ranks.rank}")}
    with joined(ranks.world_size, "cpu") as processes:
        return everything(folder, processes)

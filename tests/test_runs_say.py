"""What README.md says of the committed runs of experiments: every number with decimals is that of a record."""

import functools
import re
from pathlib import Path

import pytest

from fc_eval.collective.comm import parse_comm
from fc_eval.experiment import experiment
from fc_eval.presets import options
from fc_eval.results.files import read_json

ROOT = Path(__file__).parents[1]

# By experiment: each number of its paragraph in order, as `number` reads it; 'NAME:' before one is another experiment.
QUOTED = {
    "flash_fig4_granularity": "int4-gtoken int4-g256 int4-g128 int4-g64 int4-g32 int4-g128-sym int4-g256-sym",
    "flash_quantizer": """int5-g128 int5-g128-sym int6-g128 int6-g128-sym flash2_metadata:int4-g32-sfp16
        flash2_metadata:int4-g32-sfp16-zint16""",
    "flash_fig5_stages": "int8/int4 int4_int8 int6-g128",
    "flash_fig5_layers": """int4-g128@down_proj_only int4-g128@o_proj_only
        flash_fig5_layer_error:int4#down_proj flash_fig5_layer_error:int4#o_proj""",
    "flash_rotation": """int4-gtoken int4-gtoken-had int4-g128 int4-g128-had int4-g32 int4-g32-had
        flash2_spikes:int4-g32 flash2_spikes:int4-g32-sr""",
    "flash2_spikes": "int2-g32 int2-g32-sr int3-g128-sr int3-g128-sr$ int4-g128 int4-g128$",
    "flash_ring_two_step": """ring_int4=2 ring_int4=4 ring_int4=8 int4=2 int4=4 int4=8
        mx_one_step:one_step:int4-g32=2 mx_one_step:one_step:int4-g32=4 mx_one_step:one_step:int4-g32=8
        mx_one_step:two_step:int4-g32=2 mx_one_step:two_step:int4-g32=4 mx_one_step:two_step:int4-g32=8""",
    "mx_scale_width": """one_step:mxint5-g16-e5m0 one_step:mxfp5_e2m2-g16-e5m0 one_step:mxfp5_e3m1-g16-e5m0
        one_step:mxint4-g16-e5m0 one_step:mxfp4-g16-e5m0 one_step:mxfp4_e3m0-g16-e5m0 one_step:mxfp4-g16-e6m0
        one_step:mxfp4-g16-e4m0""",
    "mx_loss_budget": "one_step:mxfp4-g32-e5m0$ one_step:mxfp4-g32-e5m0 one_step:int5-g32$ one_step:int5-g32",
    "mx_coarse_compression": "channelwise_int4$ channelwise_int4 topk_6$ topk_6 one_step:mxfp4-g32-e5m0",
    "peers_equal_bits": """quickreduce_q6$ quickreduce_q6 int6-g32-sym int6-g64 quickreduce_q4$ quickreduce_q4
        int4-g32-sym int4-g64 zeropp_int4$ zeropp_int4""",
}


@functools.cache
def records():
    """Results by comm, W, policy and evaluations."""
    found = {}
    for file in (ROOT / "reports" / "smollm2_experiments" / "runs").glob("*/result.json"):
        result = read_json(file)
        arm = result["arm"]
        found[arm["comm_full"], arm["tp"], arm["policy"], tuple(result["evals"])] = result
    return found


def number(quoted: str, name: str) -> str:
    """The perplexity of 'ring_int4=8' (at W = 8, else 4) or 'int4-g128@o_proj_only', the bits of 'topk_6$', and
    the mean squared error of 'int4#o_proj'."""
    other, _, rest = quoted.partition(":")
    if other in options("experiment"):
        name, quoted = other, rest
    comm, policy, tp, kind = re.fullmatch(r"([^@=#$]*)(?:@(\w+))?(?:=(\d))?(?:#(\w+))?\$?", quoted).groups()
    result = records()[parse_comm(comm).name, int(tp or 4), policy or "uniform", experiment(name).evals]
    if quoted.endswith("$"):
        return f"{result['wire']['effective_bits']:,.2f}"
    (measured,) = result["results"].values()
    return f"{measured[f'{kind} isolated output mse' if kind else 'perplexity']:,.2f}"


def section():
    text = (ROOT / "README.md").read_text()
    return text.partition("## What the runs say\n")[2].partition("\n## ")[0]


def test_each_paragraph_is_known():
    assert re.findall(r"^- `(\w+)`", section(), re.M) == list(QUOTED)


@pytest.mark.parametrize("name", QUOTED)
def test_numbers_are_those_of_the_records(name):
    (line,) = re.findall(rf"^- `{name}`(.*)$", section(), re.M)
    said = re.findall(r"(?<![\w.])\d[\d,]*\.\d\d\b", line)
    assert said == [number(quoted, name) for quoted in QUOTED[name].split()]


def test_the_baselines_are_those_of_the_records():
    shown = re.search(r"\(baseline ([\d.]+) on WikiText-2 and ([\d.]+) on C4 at W = 4;", section()).groups()
    known = [records()["fp32_ordered", 4, "uniform", (text,)]["results"][text] for text in ("wikitext2", "c4")]
    assert list(shown) == [f"{measured['perplexity']:.2f}" for measured in known]
    assert section().count("189 runs") == 1
    assert len(list((ROOT / "reports" / "smollm2_experiments" / "runs").glob("*/result.json"))) == 189

"""Every leaf and node of a composed configuration, replaced and deleted: a valid configuration or one sentence."""

import copy
import json
from collections.abc import Iterator

import pytest
import yaml

from fc_eval.compose import compose_mappings, compose_one
from fc_eval.config import RunConfig
from fc_eval.errors import FcEvalError
from fc_eval.job import Job
from fc_eval.models.config import model_files
from fc_eval.presets import options

# Together they have every kind of node: packages, shapes, random weights, published numbers, rules, nodes, tasks.
BASES = {
    "package": ["policy=first_last_int8", "eval.tasks=[{task: boolq, num_fewshot: 1}]", "device=cpu"],
    "tiny": ["model=tiny", "comm=hierarchical_int4", "eval=[wikitext2,piqa]", "eval.limit=3", "device=cpu"],
    "hub": ["model=llama2_7b", "comm=int4_int8", "comm.group_size=32", "eval=commonsense", "device=cpu"],
}
DELETED = object()
VALUES = [None, 5, -1, 2.5, True, "abc", "", [], [1], ["abc"], {}, {"a": 1}, {1: 2}, DELETED]


def places(node, path=()) -> Iterator[tuple]:
    """Paths of everything below a node."""
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in entries:
        yield (*path, key)
        yield from places(value, (*path, key))


def changed(tree, path, value):
    tree = copy.deepcopy(tree)
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    if value is DELETED:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return tree


def read(tree) -> RunConfig:
    Job.from_mapping(tree)
    return RunConfig.from_mapping(tree)


def mistake(attempt) -> str | None:
    """The sentence of a user's mistake, None where there is none; every other exception is a defect and gets out."""
    try:
        attempt()
    except FcEvalError as error:
        return str(error)
    return None


def check_valid(config: RunConfig) -> None:
    """What the rest of the program does with a configuration before anything is loaded."""
    assert RunConfig.from_dict(yaml.safe_load(yaml.safe_dump(config.as_dict()))) == config
    json.dumps(config.identity())
    assert config.baseline().is_baseline
    assert isinstance(config.policy_label, str)
    model_files(config.model)


@pytest.mark.parametrize("base", BASES)
def test_every_place_of_a_configuration_takes_a_valid_value_or_gives_one_sentence(base):
    (tree,) = compose_mappings(BASES[base], sweep=False)
    check_valid(read(tree))
    refused = 0
    for path in places(tree):
        for value in VALUES:
            said = mistake(lambda path=path, value=value: check_valid(read(changed(tree, path, value))))
            assert said is None or (said and "\n" not in said), (path, value, said)
            refused += said is not None
    # Most of these values are nonsense where they stand.
    assert refused > len(VALUES) * len(list(places(tree))) / 2


@pytest.mark.parametrize("base", BASES)
def test_wrong_types_are_refused_everywhere(base):
    """No place of a configuration has a use for such a mapping, so none may take it without a word."""
    (tree,) = compose_mappings(BASES[base], sweep=False)
    for path in places(tree):
        if path == ("model", "published") or path[:2] == ("model", "published"):
            continue  # perplexities by any evaluation's name: the one open mapping
        with pytest.raises(FcEvalError):
            read(changed(tree, path, {"a": 1}))


def overrides() -> Iterator[str]:
    """Each mapping at the top without, as nothing and as a list; each other place in one of these ways, by turns."""
    (tree,) = compose_mappings(BASES["tiny"], sweep=False)
    for index, path in enumerate(places(tree)):
        key = ".".join(map(str, path))
        ways = [f"~{key}", f"{key}=null", f"{key}=[1]"]
        whole = len(path) == 1 and isinstance(tree[key], dict)
        yield from ways if whole else [ways[index % 3]]


def test_every_override_composes_or_gives_one_sentence():
    for override in overrides():
        said = mistake(lambda override=override: check_valid(compose_one([*BASES["tiny"], override])))
        assert said is None or (said and "\n" not in said), (override, said)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+foo=1", "unknown key 'foo': expected one of"),
        ("+dry_rnu=true", "unknown key 'dry_rnu': did you mean 'dry_run'"),
        ("+model.dtpye=fp16", "unknown key in model: 'dtpye': did you mean 'dtype'"),
        ("+eval.limt=3", "unknown key in eval: 'limt': did you mean 'limit'"),
        ("+data.rot=x", "unknown key in data: 'rot': did you mean 'root'"),
        ("+policy.rule=[]", "unknown key in policy: 'rule': did you mean 'rules'"),
        ("++eval.runs.text.windows=3", "unknown key of evaluation 'text': 'windows': did you mean 'window_tokens'"),
        ("hydra.verbose=true", "Hydra's own settings have no effect here"),
        ("comm=[int4,int8]", "a run of each is a sweep, fc-eval run -m comm=int4,int8"),
        ("model=[tiny,smollm2]", "fc-eval run -m model=tiny,smollm2"),
        ("policy=[uniform]", "a run has one policy"),
        ("tp=2,4", "a sweep over them needs -m, as in fc-eval run -m tp=2,4"),
        ("eval=null", "eval=null is not possible: choose by name, eval=NAME or"),
        ("policy=null", "policy=null is not possible: choose by name, policy=NAME"),
        ("eval.tasks=5", "eval.tasks=5 is not possible: expected a list"),
        ("eval.runs=5", "eval.runs=5 is not possible"),
        ("eval.runs.text.kind=[a]", "unknown kind of evaluation 'text'"),
        ("eval.runs.text.path=5", "path=5 of evaluation 'text': expected text, or null"),
        ("policy.rules=5", "policy.rules=5 is not possible: expected a list"),
        ("~tp", "tp is missing"),
        ("eval=piqa eval.runs.text.limit=3", "eval.runs.text.limit is not part of what was chosen"),
        (
            "model.shape={a:1}",
            "model.shape is not part of what was chosen (`fc-eval run --cfg` prints that), or its value",
        ),
        ("threads=100000", "threads=100000 is not possible: expected 1 to 1024"),
        ("~eval.limit", "~eval.limit is not possible: eval.limit is null or not part of what was chosen"),
        ("~comm.gather", "~comm.gather is not possible: comm.gather is null or not part of what was chosen"),
        ("eval.tasks={a:1}", "eval.tasks={a:1} is not possible: the value is of another kind than the one that"),
        ("model.name=''", "model.name='' is not possible"),
        ("out=rüns", "could not be read: expected KEY=VALUE; a value with special characters needs quotes"),
        ("tp=???", "Missing mandatory value"),
        ("tp=${nowhere}", "Interpolation key 'nowhere' not found"),
    ],
)
def test_mistakes_of_the_command_line_are_named(override, words):
    with pytest.raises(FcEvalError) as caught:
        read(compose_mappings(override.split(), sweep=False)[0])
    assert words in str(caught.value)


def test_a_sweep_is_every_combination():
    jobs = compose_mappings(["comm=int4,int8", "tp=range(2,5,2)", "eval=[text,piqa],everyday"], sweep=True)
    found = [(job["comm"]["reduce"], job["tp"], list(job["eval"]["runs"])) for job in jobs]
    assert found == [
        (comm, tp, evals) for comm in ("int4", "int8") for tp in (2, 4) for evals in (["text", "piqa"], ["everyday"])
    ]
    with pytest.raises(FcEvalError, match="has no end of values"):
        compose_mappings(["tp=interval(1,2)"], sweep=True)
    with pytest.raises(FcEvalError, match="a run has one comm"):
        compose_mappings(["comm=[int4,int8],int6"], sweep=True)


def test_rules_that_no_preset_has_are_never_called_by_its_name():
    rule = "policy.rules=[{match:'*.o_proj',comm:int8}]"
    for override in (rule, f"policy=down_proj_int8 {rule}", f"policy=uniform {rule}"):
        config = compose_one(override.split())
        assert (config.policy, config.policy_name) == ((("*.o_proj", "int8"),), "custom")
        assert config.policy_label == "*.o_proj int8"
    same = compose_one(["policy.rules=[{match:'*.o_proj',comm:int8}]", "policy=o_proj_int8"])
    assert (same.policy_name, same.policy_label) == ("o_proj_int8", "o_proj_int8")
    emptied = compose_one(["policy=o_proj_int8", "policy.rules=[]"])
    assert (emptied.policy_name, emptied.policy_label) == ("uniform", "")
    many = compose_one(["policy.rules=[" + ",".join(f"{{match:'*.layers.{i}.*',comm:int8}}" for i in range(9)) + "]"])
    assert many.policy_label == "policy of 9 rules"
    own = compose_one([rule, "policy.name=mine"])
    assert own.policy_label == "mine"


@pytest.mark.parametrize("out", ["", "  "])
def test_a_folder_of_runs_has_a_name(out):
    with pytest.raises(FcEvalError, match=r"^out= names no folder: give the one of the run folders with out=DIR"):
        Job.from_mapping({"out": out, "dry_run": True})


def test_every_model_takes_a_note():
    for name in options("model"):
        given = ["model.path=."] if name == "local" else []
        assert compose_mappings([f"model={name}", *given, "model.note=mine"], sweep=False)[0]["model"]["note"] == "mine"
    assert compose_one(["model=tiny"]).model.note is None

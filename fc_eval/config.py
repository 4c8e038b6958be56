"""The resolved configuration of one run: frozen, validated, and free of files, devices and tensor libraries.

Hydra composes a mapping from `conf/`; `RunConfig.from_mapping` turns it into this, or says in one sentence what is
wrong with it. The same mapping is what a run folder keeps as `config.yaml`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from fc_eval.collective.comm import BASELINE, parse_comm
from fc_eval.comm_config import CommConfig
from fc_eval.errors import FcEvalError, unknown
from fc_eval.evaluate.spec import EvalSpec, LayerErrorSpec, parse_spec, parse_specs
from fc_eval.job import JOB_KEYS
from fc_eval.models.config import ModelConfig
from fc_eval.parallel.policy import Policy, Rule
from fc_eval.settings import build, check_scalars, checked_mapping

EXECS = ("emulated", "tp")
PLANS = ("auto", "full", "row_only")
REDUCERS = ("auto", "fused", "staged", "torch", "gathered")
CODECS = ("auto", "reference", "cpu", "cuda")
DEVICES = ("auto", "cpu", "cuda")
# Above this, threads are a slip of the keyboard: the system has no room for their stacks.
MAX_THREADS = 1024
# Names of policies: no rules at all, and rules that are those of no preset.
UNIFORM, CUSTOM = "uniform", "custom"
# Rules are written out in a label up to this length, and counted above it.
LABEL_CHARACTERS = 60


@dataclass(frozen=True)
class EvalConfig:
    """What is measured, and how much of it.

    Attributes:
        specs: the evaluations, in order.
        batch_size: requests per batch of lm-eval tasks.
        window_batch: windows per forward pass of perplexity.
        divergence: also KL and top-1 agreement with the baseline over the perplexity windows (one more forward each).
    """

    specs: tuple[EvalSpec, ...]
    batch_size: int = 8
    window_batch: int = 1
    divergence: bool = False


@dataclass(frozen=True)
class RunConfig:
    """One run: one model under one comm, and everything that it is measured by.

    Attributes:
        model: where the weights come from, and in which dtype they run.
        comm: the default comm of every row-parallel layer.
        policy: ordered layer rules in front of that default.
        policy_name: name of the policy preset.
        tp: tensor-parallel world size W.
        eval: the evaluations.
        exec: how the ranks are carried out (`emulated`: all of them in one process; `tp`: a process each).
        plan: which layers are split (`row_only`: those that communicate; `full`: the column-parallel ones as well).
        reducer: what reduces under exec=tp (`auto`: torch).
        codec: which codec encodes (`auto`: the fastest that covers the formats on the device).
        device: `cpu`, `cuda`, or `auto` (a GPU where there is one).
        data_root: folder that mirrors dataset ids, None for the Hub.
        seed: seed of everything that draws.
        threads: CPU threads of each process; None, with device=cpu, for OMP_NUM_THREADS or an even share of the CPUs.
        processes: groups of ranks that share the windows and requests, each with a whole model; under exec=emulated a
            group is one process. 'auto' for as many as there are GPUs for.
    """

    model: ModelConfig
    comm: CommConfig
    policy: tuple[tuple[str, str], ...]
    policy_name: str
    tp: int
    eval: EvalConfig
    exec: str = "emulated"
    plan: str = "auto"
    reducer: str = "auto"
    codec: str = "auto"
    device: str = "auto"
    data_root: str | None = None
    seed: int = 0
    threads: int | None = None
    processes: int | str = "auto"

    def __post_init__(self) -> None:
        check_scalars("", self)
        if not 0 <= self.seed < 2**32:
            raise FcEvalError(f"seed={self.seed} is not possible: expected 0 to {2**32 - 1}")
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise FcEvalError(
                f"threads={self.threads} is not possible: expected 1 to {MAX_THREADS}, or null for the default"
            )
        if self.tp < 1:
            raise FcEvalError(f"tp={self.tp} is not possible: expected a whole number of ranks, at least 1")
        if self.processes != "auto" and (isinstance(self.processes, str) or self.processes < 1):
            raise FcEvalError(f"processes={self.processes} is not possible: expected at least 1, or auto")
        if self.model.device_map and self.processes not in ("auto", 1):
            raise FcEvalError(
                f"processes={self.processes} and model.device_map={self.model.device_map} do not go together: a model "
                "that is spread over the GPUs leaves none for other processes; set one of them"
            )
        for kind, known in _CHOICES.items():
            if (value := getattr(self, kind)) not in known:
                raise unknown(kind, str(value), known)
        self._check_exec()
        check_scalars("eval", self.eval)
        for name in ("batch_size", "window_batch"):
            value = getattr(self.eval, name)
            if value < 1:
                raise FcEvalError(f"eval.{name}={value} is not possible: expected a whole number, at least 1")
        if not self.eval.specs:
            raise FcEvalError(
                "nothing to evaluate: choose with eval=wikitext2, eval=[wikitext2,piqa] or eval.tasks=[...]"
            )
        node = self.comm.node_size
        if node and self.tp % node:
            raise FcEvalError(f"comm.node_size={node} does not divide tp={self.tp}: ranks must fill whole nodes")
        self.build_policy()

    def _check_exec(self) -> None:
        watches = any(isinstance(spec, LayerErrorSpec) for spec in self.eval.specs)
        if watches and (self.exec == "tp" or self.tp == 1):
            raise FcEvalError("layer errors need partial sums of 2 ranks or more in one process: exec=emulated tp=2")
        if self.exec == "emulated" and self.reducer != "auto":
            raise FcEvalError(f"reducer={self.reducer} reduces between real ranks: add exec=tp, or leave it out")
        if self.exec == "tp" and self.tp == 1:
            raise FcEvalError("exec=tp needs at least 2 ranks, but tp=1: nothing would be reduced")
        if self.exec == "tp" and self.model.device_map:
            raise FcEvalError(
                f"exec=tp and model.device_map={self.model.device_map} do not go together: a rank has one device; "
                "leave out model.device_map"
            )

    @property
    def ranks(self) -> int:
        """Processes that share one model: W under exec=tp, otherwise 1."""
        return self.tp if self.exec == "tp" else 1

    @property
    def split_plan(self) -> str:
        """The plan with `auto` resolved: the emulator splits what it has to, real ranks all that they can."""
        return self.plan if self.plan != "auto" else "full" if self.exec == "tp" else "row_only"

    def build_policy(self) -> Policy:
        """The comm of each layer: the rules in order, then the default."""
        return Policy(self.comm.build(), tuple(Rule(match, parse_comm(comm)) for match, comm in self.policy))

    @property
    def policy_label(self) -> str:
        """What the policy does, for tables: its preset's name, or its rules ('*.o_proj int8'); empty for `uniform`."""
        if self.policy_name != CUSTOM:
            return "" if self.policy_name == UNIFORM else self.policy_name
        text = ", ".join(f"{match} {comm}" for match, comm in self.policy)
        return text if len(text) <= LABEL_CHARACTERS else f"policy of {len(self.policy)} rules"

    @property
    def is_baseline(self) -> bool:
        """Whether this run is the one that others are compared with."""
        return not self.policy and self.comm.build() == BASELINE

    def baseline(self) -> "RunConfig":
        """The same run with `fp32_ordered` everywhere; divergence from itself is not measured."""
        return replace(
            self,
            comm=CommConfig(BASELINE.algorithm),
            policy=(),
            policy_name=UNIFORM,
            codec="auto",
            reducer="auto",
            eval=replace(self.eval, divergence=False),
        )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "RunConfig":
        """Builds and validates the configuration that Hydra composed; the keys of `Job` may stand beside its own.

        Raises:
            FcEvalError: a key that is not known, a missing one, or a value that is not possible.
        """
        tree = checked_mapping("", mapping, [*_KEYS, *JOB_KEYS], ["model", "comm", "policy", "eval", "tp"])
        data = checked_mapping("data", tree.get("data", {}), ["root"])
        evals = checked_mapping("eval", tree["eval"], ["runs", "tasks", "limit", *_EVAL_KEYS])
        specs = parse_specs(evals.get("runs", {}), evals.get("tasks", []), evals.get("limit"))
        rules, policy_name = _policy(tree["policy"])
        return cls(
            model=ModelConfig.from_mapping(tree["model"]),
            comm=build("comm", CommConfig, tree["comm"]),
            policy=rules,
            policy_name=policy_name,
            eval=EvalConfig(specs, **{key: evals[key] for key in _EVAL_KEYS if key in evals}),
            data_root=data.get("root"),
            **{key: tree[key] for key in _SCALARS if key in tree},
        )

    def as_dict(self) -> dict[str, Any]:
        """A plain mapping of all fields, which `from_dict` reads back."""
        tree = asdict(self)
        tree["eval"]["specs"] = [{"kind": spec.kind, **asdict(spec)} for spec in self.eval.specs]
        tree["policy"] = [list(rule) for rule in self.policy]
        return tree

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> "RunConfig":
        """The configuration that `as_dict` wrote."""
        evals = dict(tree["eval"])
        specs = tuple(parse_spec(s["name"], {k: v for k, v in s.items() if k != "name"}) for s in evals.pop("specs"))
        return cls(
            **dict(tree)
            | {
                "model": ModelConfig.from_mapping(tree["model"]),
                "comm": CommConfig(**tree["comm"]),
                "policy": tuple((match, comm) for match, comm in tree["policy"]),
                "eval": EvalConfig(specs, **evals),
            }
        )

    def identity(self) -> dict[str, Any]:
        """What the fingerprint is made of: places of files are left out, because their contents count."""
        tree = self.as_dict()
        tree["comm"] = self.comm.build().name
        tree["model"] = self.model.identity()
        tree.pop("data_root")
        for spec in tree["eval"]["specs"]:
            spec.pop("path", None)
        tree.pop("policy_name")
        tree.pop("processes")  # each batch is computed as it is by one process alone
        if self.device == "cuda":  # CPU threads compute no number there; on a CPU the order of sums follows them
            tree.pop("threads")
        tree["plan"] = self.split_plan
        if self.exec == "emulated":
            tree.pop("reducer")
            if tree["plan"] == "row_only":
                tree.pop("plan")
        return tree


_EVAL_KEYS = tuple(field.name for field in fields(EvalConfig) if field.name != "specs")
_CHOICES = {"exec": EXECS, "plan": PLANS, "reducer": REDUCERS, "codec": CODECS, "device": DEVICES}
_SCALARS = ("tp", *_CHOICES, "seed", "threads", "processes")
_KEYS = ("model", "comm", "policy", "eval", "data", *_SCALARS)


def _policy(value: Any) -> tuple[tuple[tuple[str, str], ...], str]:
    """The rules of a policy and its name: rules that no preset of that name has are `custom`."""
    policy = checked_mapping("policy", value, ["name", "rules"])
    rules, name = policy.get("rules", []), policy.get("name", CUSTOM)
    if not isinstance(rules, (list, tuple)):
        raise FcEvalError(f"policy.rules={rules!r} is not possible: expected a list of {{match: PATTERN, comm: NAME}}")
    if not isinstance(name, str):
        raise FcEvalError(f"policy.name={name!r} is not possible: expected text")
    pairs = tuple(_rule(rule, index) for index, rule in enumerate(rules))
    if not pairs:
        return (), UNIFORM
    return pairs, CUSTOM if name == UNIFORM else name


def _rule(rule: Any, index: int) -> tuple[str, str]:
    if not isinstance(rule, Mapping) or set(rule) != {"match", "comm"}:
        raise FcEvalError(f"policy rule {index} is {rule!r}: expected {{match: PATTERN, comm: NAME}}")
    for key in ("match", "comm"):
        if not isinstance(rule[key], str):
            raise FcEvalError(f"{key}={rule[key]!r} of policy rule {index} is not possible: expected text")
    return rule["match"], rule["comm"]

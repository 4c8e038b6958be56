"""Which comm each layer gets: ordered rules on the layer's name, the first that matches wins."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fc_eval.collective.comm import Comm
from fc_eval.errors import FcEvalError
from fc_eval.parallel.site import Site


@dataclass(frozen=True)
class Rule:
    """Layers whose full name matches the glob `match` use `comm`.

    `{last}` in the pattern stands for the index of the model's last decoder layer: `*.layers.{last}.*`.
    """

    match: str
    comm: Comm


@dataclass(frozen=True)
class Policy:
    """Rules in order of precedence, and the comm of every layer that none of them matches."""

    default: Comm
    rules: tuple[Rule, ...] = ()

    def assign(self, sites: Sequence[Site]) -> dict[str, Comm]:
        """The comm of each site, by full name and in the order of `sites`.

        Raises:
            FcEvalError: a rule that matches no site, or only sites that an earlier rule has taken.
        """
        last = max((site.layer for site in sites if site.layer is not None), default=0)
        chosen: dict[str, Comm] = {}
        for index, rule in enumerate(self.rules):
            pattern = rule.match.replace("{last}", str(last))
            matches = [site.name for site in sites if fnmatchcase(site.name, pattern)]
            if not matches:
                examples = ", ".join(dict.fromkeys(f"*.{site.kind}" for site in sites))
                raise FcEvalError(
                    f"policy rule {index} ({rule.match!r}) matches no row-parallel layer: "
                    f"names look like {sites[0].name!r}, so patterns such as {examples} match"
                )
            free = [name for name in matches if name not in chosen]
            if not free:
                raise FcEvalError(
                    f"policy rule {index} ({rule.match!r}) has no effect: earlier rules have taken all {len(matches)} "
                    "layers that it matches; move it up or leave it out"
                )
            chosen.update(dict.fromkeys(free, rule.comm))
        return {site.name: chosen.get(site.name, self.default) for site in sites}

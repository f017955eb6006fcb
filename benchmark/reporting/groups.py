"""Groups of runs: the seeds of one experiment name with one setting in one environment."""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

from experiments import HOUSEKEEPING, PAPER_ENVS, ROOT, SMOKE, SWEEPS, VARIANTS, short_name
from flags import script_defaults
from identity import deviations, expected, label, parts_of

from .runs import Run, Warnings

VERSION = "script_sha256"  # what tells versions of a script apart, beside the settings
BY_ENVIRONMENT = {"buffer_size", "target_entropy", "beta", "eval_beta_max", "eval_k_max"}  # which scripts fill in


@dataclass
class Group:
    """The runs of one experiment name with one setting in one environment: one per seed."""

    env_id: str
    exp_name: str
    runs: list[Run] = field(default_factory=list)
    settings: str = ""  # that its runs share, as JSON
    label: str = ""
    told_apart_by: dict = field(default_factory=dict)  # the settings in which it differs from others of its name
    matches_name: bool = False  # whether no others of them have the settings that its name stands for, versions aside

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from all other groups."""
        return self.env_id, self.exp_name, self.settings

    @property
    def condition(self) -> str:
        return self.runs[0].condition

    @property
    def last(self) -> int:
        """The last step at which all seeds were evaluated; where there is none, the earliest end of a seed."""
        common = set.intersection(*(set(run.eval.index) for run in self.runs))
        return int(max(common, default=min(run.last for run in self.runs)))

    def deviations(self, exp_name: str) -> dict:
        """The settings that are not those of an experiment name, by the script that its run has kept."""
        return self.runs[0].deviations(exp_name)

    @property
    def own_defaults(self) -> dict:
        """The settings that are its name's by the script that its run has kept, but not by today's."""
        run = self.runs[0]
        today, then = deviations(run.args, run.script, self.exp_name, self.env_id), self.deviations(self.exp_name)
        return {key: value for key, value in today.items() if key not in then}

    @property
    def has_settings_of_name(self) -> bool:
        """Whether all its settings are those that its name stands for today; not known of somebody's own name."""
        return not (self.own_defaults or self.deviations(self.exp_name))


def plain(text: str) -> str:
    """In one line, with a $ that matplotlib does not read as mathematics, and another | than that which ends a table's cell."""
    return " ".join(text.split()).replace("$", r"\$").replace("|", "¦")


def shared_settings(runs: list[Run]) -> dict:
    """The settings beside those of the variants, in experiment names (+utd_5) or by hand, that all of the runs have."""
    named = set()
    for run in runs:
        named |= dict(parts_of(run.exp_name)[1]).keys() | run.deviations(run.exp_name).keys()
    values = {name: {json.dumps(run.args.get(name)) for run in runs} for name in sorted(named)}
    return {name: json.loads(*found) for name, found in values.items() if len(found) == 1 and found != {"null"}}


def settings_of(run: Run) -> dict:
    """What tells runs of one name apart.

    An argument that its script did not have yet counts as today's default: a new one's default is what was done before it.
    """
    known = (variant.script for variant in VARIANTS.values() if Path(variant.script).stem == run.script)
    script = next(known, f"{run.script}.py")
    since = script_defaults(script) if (ROOT / script).is_file() else {}
    settings = {**since, **run.args, "script": run.script}
    return {name: value for name, value in settings.items() if name not in HOUSEKEEPING and value is not None}


def group_runs(runs: list[Run], warnings: Warnings) -> list[Group]:
    """Runs by environment and experiment name, in the paper's order; other settings under one name are told apart, and versions
    of a script that have a seed in common.

    Settings that all runs share (see shared_settings) are in no label.
    """
    shared = shared_settings(runs)
    groups = []
    for same in by_name(runs).values():
        label_groups(same, shared, warnings)
        groups += same
    tell_labels_apart(groups, warnings)
    for group in groups:
        keep_one_run_a_seed(group, warnings)
        leave_out_late_seeds(group, warnings)
        warn_of_own_defaults(group, warnings)
    warn_of_versions(groups, warnings)
    warn_of_other_settings_elsewhere(groups, warnings)
    warn_of_bias_sizes(groups, warnings)
    order = {name: i for i, name in enumerate(VARIANTS)}
    return sorted(groups, key=lambda g: (env_order(g.env_id), order.get(parts_of(g.exp_name)[0], len(order)), g.label))


def by_name(runs: list[Run]) -> dict[tuple[str, str], list[Group]]:
    """The groups of each environment and experiment name: one for each setting, and version where they share a seed."""
    apart = names_of_several_versions(runs)
    found = defaultdict(dict)
    for run in runs:
        version = {VERSION: run.version[:8]} if run.exp_name in apart else {}
        settings = json.dumps({**settings_of(run), **version}, sort_keys=True)
        group = found[run.env_id, run.exp_name].setdefault(settings, Group(run.env_id, run.exp_name, settings=settings))
        group.runs.append(run)
    return {name: list(same.values()) for name, same in found.items()}


def names_of_several_versions(runs: list[Run]) -> set[str]:
    """The experiment names under which versions of a script have a seed in common, with the same settings, in an environment."""
    found = defaultdict(set)
    for run in runs:
        settings = json.dumps(settings_of(run), sort_keys=True)
        found[run.exp_name, run.env_id, run.seed, settings].add(run.version)
    return {name for (name, *_), versions in found.items() if len(versions) > 1}


def label_groups(same: list[Group], shared: dict, warnings: Warnings) -> None:
    """Label the groups of one environment and experiment name, by the settings in which they differ too."""
    env_id, name = same[0].env_id, same[0].exp_name
    settings = [json.loads(group.settings) for group in same]
    keys = sorted(set().union(*settings))
    differing = [key for key in keys if len({json.dumps(args.get(key)) for args in settings}) > 1]
    matching = [args for group, args in zip(same, settings, strict=True) if expected(name, env_id) and group.has_settings_of_name]
    alike = len({json.dumps({**args, VERSION: None}, sort_keys=True) for args in matching}) == 1
    for group, args in zip(same, settings, strict=True):
        group.told_apart_by = {key: args.get(key) for key in keys if key in differing or key == VERSION}
        group.matches_name = alike and args in matching
        # Also where all runs of a name agree with each other, but not with what the name stands for.
        own = {key: value for key, value in group.deviations(name).items() if key not in shared}
        more = group.told_apart_by  # only the others need more words than the version
        if group.matches_name:
            more = {key: value for key, value in more.items() if key == VERSION}
        shown = ", ".join(f"{key} {value}" for key, value in {**own, **more}.items())
        group.label = plain(label(name, shared) + (f" [{shown}]" if shown else ""))
    if len(same) > 1:
        where = "; ".join(str(group.runs[0].path) for group in same)
        warnings.add(f"runs of {name} on {env_id} differ in {', '.join(differing)} and are shown apart ({where}).")


def by_label(groups: list[Group]) -> dict[str, list[Group]]:
    """The groups of every algorithm as a reader sees it, in all environments."""
    found = defaultdict(list)
    for group in groups:
        found[group.label].append(group)
    return found


def tell_labels_apart(groups: list[Group], warnings: Warnings) -> None:
    """Add the experiment name to labels that groups of several names have."""
    for alike in by_label(groups).values():
        names = {group.exp_name for group in alike}
        if len(names) > 1:
            warnings.add(f"runs of {' and of '.join(sorted(names))} are called alike and told apart by their experiment names.")
            for group in alike:
                group.label += f" [exp_name {plain(group.exp_name)}]"


def keep_one_run_a_seed(group: Group, warnings: Warnings) -> None:
    """Of several runs with one seed the longest stays; seeds in order."""
    seeds = {}
    for run in sorted(group.runs, key=lambda run: (run.last, str(run.path))):
        if run.seed in seeds:
            same = f"{seeds[run.seed].path} and {run.path} are the same run (seed {run.seed})"
            warnings.add(f"{same}; the second is used, which is not shorter.")
        seeds[run.seed] = run
    group.runs = [seeds[seed] for seed in sorted(seeds)]


def leave_out_late_seeds(group: Group, warnings: Warnings) -> None:
    """Leave out runs whose first evaluation comes after the group's last common one."""
    late = [run for run in group.runs if run.eval.index[0] > group.last]
    for run in late:
        warnings.add(f"{run.path} has no evaluation by step {group.last:,}, the last of another seed: left out.")
    group.runs = [run for run in group.runs if run not in late]


def warn_of_versions(groups: list[Group], warnings: Warnings) -> None:
    """Say which runs of one label, or which sessions of one run, are of different versions of a script."""
    for same in by_label(groups).values():
        runs = [run for group in same for run in group.runs]
        by_text = {run.script_sha256: run for run in runs}
        if len(by_text) > 1:
            where = " and ".join(str(run.path) for run in by_text.values())
            warnings.add(f"{where} are of one algorithm by their name, but different versions of {runs[0].script}.py made them.")
        for run in runs:
            if "+" in run.script_sha256:
                other = f"went on with another version of {run.script}.py than the one that began it"
                warnings.add(f"{run.path} {other}; its commit is that of the last.")


def warn_of_other_settings_elsewhere(groups: list[Group], warnings: Warnings) -> None:
    """Say in which settings the runs of somebody's own name differ between environments: they are one algorithm in the report."""
    for name, same in by_label(groups).items():
        if any(expected(group.exp_name, group.env_id) for group in same):
            continue  # what its settings are in each environment is known
        settings = [json.loads(group.settings) for group in same]
        keys = sorted(set().union(*settings) - BY_ENVIRONMENT - {VERSION})
        differing = [key for key in keys if len({json.dumps(args.get(key)) for args in settings}) > 1]
        if differing:
            values = "; ".join(
                f"{group.env_id}: {', '.join(f'{key} {args.get(key)}' for key in differing)}"
                for group, args in zip(same, settings, strict=True)
            )
            warnings.add(f"{name} has other settings in one environment than in another ({values}).")


def warn_of_own_defaults(group: Group, warnings: Warnings) -> None:
    """Say where a script's defaults are not today's: its runs are called as those of today's are."""
    run = group.runs[0]
    if group.own_defaults:
        other = ", ".join(f"{key} {value}" for key, value in group.own_defaults.items())
        given = "no difference from the paper and no ratio to REDQ is given"
        warnings.add(f"the {run.script}.py of {run.path} has other defaults than today's ({other}): {given}.")


def warn_of_bias_sizes(groups: list[Group], warnings: Warnings) -> None:
    """Say which value biases were not measured alike."""
    by_sizes = {sizes: run for group in groups for run in group.runs for sizes in run.bias_sizes}
    if len(by_sizes) > 1:
        where = " and ".join(str(run.path) for run in by_sizes.values())
        warnings.add(f"the value biases of {where} were measured at different sizes.")


def env_order(env_id: str) -> tuple:
    names = [short_name(name) for name in PAPER_ENVS]
    return (names.index(short_name(env_id)) if short_name(env_id) in names else len(names), env_id)


def sweep_groups(groups: list[Group], sweep: str) -> list[Group]:
    """The groups of a sweep by value, and called by it, in environments that have at least two of its values.

    A group is of the sweep if nothing but the sweep's argument differs from the base variant, whatever its name.
    """
    base, argument, symbol, *_ = SWEEPS[sweep]
    found = [(group.runs[0].args.get(argument), group) for group in groups if set(group.deviations(base)) <= {argument}]
    found = [(value, group) for value, group in found if isinstance(value, int | float) and not group.exp_name.startswith(SMOKE)]
    members, values = [], Counter((group.env_id, value) for value, group in found)
    for value, group in sorted(found, key=lambda pair: pair[0]):
        if sum(env_id == group.env_id for env_id, _ in values) > 1:
            shown = {True: "on", False: "off"}[value] if isinstance(value, bool) else f"{value:g}"
            twice = values[group.env_id, value] > 1
            members.append(replace(group, label=f"{symbol} = {shown}" + (f" ({group.label})" if twice else "")))
    return members

"""Who stops bad trials early: Tune's schedulers, in epochs, each of them watched (see `trials.py`)."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    HyperBandForBOHB,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
)
from ray.tune.schedulers.pb2 import PB2

from manta.config import Config
from manta.runs import RunDir
from manta.search.domains import is_mutable
from manta.search.exploit import place
from manta.search.record import trial_dir
from manta.search.settings import scheduler as settings_of
from manta.search.space import Space
from manta.search.trials import CONTINUE, Watched, number_of

PAUSING = ("hyperband", "median_stopping", "pbt", "pb2", "bohb")
"""Schedulers that pause trials to let others run, so that all trials may be alive at once."""
_CLASSES = {
    "asha": AsyncHyperBandScheduler,
    "hyperband": HyperBandScheduler,
    "median_stopping": MedianStoppingRule,
    "pbt": PopulationBasedTraining,
    "pb2": PB2,
    "bohb": HyperBandForBOHB,
}


class Exploiting(Watched):
    """Mixed into population based training: the weights really move, through the run directories."""

    run: RunDir
    space: Space
    renew: Callable[[Trial], None]
    """Has the receiver's run directory follow its new values."""

    def told_again(self, controller: Any, trial: Trial, result: dict[str, Any]) -> str:  # noqa: ARG002
        """Know the trial's score and when it was last perturbed; what came of it is in the study."""
        me: Any = self
        state, epoch = me._trial_state[trial], result["epoch"]
        me._save_trial_state(state, epoch, result, trial)
        state.last_perturbation_time = epoch - epoch % me._perturbation_interval
        return str(CONTINUE)

    def _get_new_config(self, trial: Trial, trial_to_clone: Trial) -> tuple[dict[str, Any], dict[str, Any]]:
        """Tune multiplies without looking at bounds; and what belongs to the trial itself stays."""
        config, operations = super()._get_new_config(trial, trial_to_clone)  # type: ignore[misc]
        config = {**trial.config, **{key: config[key] for key in self.space.domains}}
        for key, domain in self.space.domains.items():
            bounds = domain.tune()
            lower, upper = getattr(bounds, "lower", None), getattr(bounds, "upper", None)
            if lower is not None and upper is not None:
                config[key] = type(config[key])(min(max(config[key], lower), upper))
        return config, operations

    def _exploit(self, controller: Any, trial: Trial, trial_to_clone: Trial) -> None:
        super()._exploit(controller, trial, trial_to_clone)  # type: ignore[misc]
        number, donor = number_of(trial), number_of(trial_to_clone)
        values = {key: trial.config[key] for key in self.space.domains}
        exploit = {"donor": donor, "values": values, "index": len(self.study.records[number].exploits) + 1}
        epoch = place(trial_dir(self.run, donor), trial_dir(self.run, number), exploit)
        self.study.exploited(number, donor, epoch, values)
        self.renew(trial)


def make_scheduler(config: Config, space: Space, run: RunDir, renew: Callable[[Trial], None]) -> Any:
    """The scheduler of `search.scheduler`, or the one that lets every trial run to its end."""
    settings, arguments = settings_of(config), {}
    cls: type = FIFOScheduler
    if settings is not None:
        cls = _CLASSES[config.search.scheduler["name"]]
        arguments = {"time_attr": "epoch", **asdict(settings)}
    mutable = {key: domain for key, domain in space.domains.items() if is_mutable(key, domain)}
    if cls is PopulationBasedTraining:
        arguments |= {
            "hyperparam_mutations": {k: d.values or d.tune() for k, d in mutable.items()},
            "log_config": False,
        }
    if cls is PB2:
        bounds = {key: domain.tune() for key, domain in mutable.items()}
        arguments |= {"hyperparam_bounds": {k: [d.lower, d.upper] for k, d in bounds.items()}, "log_config": False}
    mixin = Exploiting if issubclass(cls, PopulationBasedTraining) else Watched
    scheduler: Any = type(f"{mixin.__name__}{cls.__name__}", (mixin, cls), {})(**arguments)
    if mixin is Exploiting:
        scheduler.run, scheduler.space, scheduler.renew = run, space, renew
    return scheduler

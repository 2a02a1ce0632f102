"""Every mistake we know: exit code 2, one message with the way out, no traceback, nothing left behind, nothing heavy.

Add a row: what is typed and what the answer must contain. COMMANDS run as a user runs them; VALUES, which are
many, are composed and checked in this process.
"""

import copy
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from PIL import Image

from manta.checks import NUMBERS, check, numbers
from manta.commandline import with_domains
from manta.config import Config, from_hydra, register
from manta.errors import FAILED, FINISHED, INVALID, MantaError
from manta.launch import launch
from manta.runs import RunDir, writing
from tests.conftest import Lab, compose_run

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"torch", "ray", "numpy"}
WATCH = """
import atexit, os, sys
atexit.register(lambda: open(os.environ["MODULES_FILE"], "w").write(" ".join(sys.modules)))
"""


@dataclass(frozen=True)
class Bad:
    """A command that must be refused."""

    arguments: str
    """As typed in a shell after `python train.py`."""
    says: tuple[str, ...]
    """What the message must contain: the name, the value, the way out."""
    files: Mapping[str, str | bytes | None] = field(default_factory=dict)
    """Files beside train.py, in a copy of the project; None makes a folder."""
    env: Mapping[str, str] = field(default_factory=dict)
    light: bool = True
    """Whether the answer must come without importing anything heavy."""


COMMANDS = [
    # names
    Bad("modle=mlp", ("modle=mlp", "did you mean model=mlp?", "Try: python train.py model=mlp")),
    Bad("modle=mpl seed=1", ("modle", "model=mlp", "Options of model:", "Try: python train.py model=mlp seed=1")),
    Bad("model=mlpp", ("model=mlpp", "Options of model:", "mlp", "Try: python train.py model=mlp")),
    Bad("model=zzzz", ("model=zzzz does not exist", "Options of model:")),
    Bad("tracking=wandbb", ("tracking=wandbb does not exist", "Try: python train.py tracking=wandb")),
    Bad("tracking=mlflow plan=true", ("MLFLOW_TRACKING_URI=foo://bar", "http://host:port"), env={"MLFLOW_TRACKING_URI": "foo://bar"}),
    Bad("tracking=wandb", ("WANDB_MODE=foo", "online, offline, disabled"), env={"WANDB_MODE": "foo"}),
    Bad("tracking=wandb plan=true", ("WANDB_API_KEY", "has 5 characters", "tracking.wandb.mode=offline"), env={"WANDB_API_KEY": "short"}),
    Bad("data=digit", ("data=digit does not exist", "Try: python train.py data=digits")),
    Bad("optimizer.learning_rate=1", ("optimizer.learning_rate", "optimizer.lr=1", "+optimizer.learning_rate=1")),
    Bad("optimizer.xyzzy=1", ("optimizer.xyzzy", "optimizer has _target_, lr", "+optimizer.xyzzy=1")),
    Bad("training.epoch=3", ("training.epoch=3", "Try: python train.py training.epochs=3")),
    Bad("trainer.max_epochs=3", ("trainer.max_epochs", "Try: python train.py training.epochs=3")),
    Bad("lr=0.1", ("lr=0.1", "Try: python train.py optimizer.lr=0.1")),
    Bad("batch_size=8", ("batch_size=8", "Try: python train.py data.batch_size=8")),
    Bad("training.batch_size=8", ("training.batch_size", "Try: python train.py data.batch_size=8")),
    Bad("gpus=2", ("gpus=2", "scaling.num_workers=2")),
    Bad("scaling.nope.deep=3", ("scaling.nope.deep", "scaling has num_workers")),
    Bad("qqqqq=3", ("qqqqq=3", "--cfg job")),
    Bad("+modle=mlp", ("modle=mlp", "Did you mean model (without +)?")),
    Bad("+data.bach_size=3", ("data.bach_size=3", "data.batch_size")),
    Bad("~nope", ("~nope", "nope", "--cfg job")),
    Bad("~data.root", ("data.root", "cannot be removed")),
    Bad("+data.root=x", ("+data.root=x", "Try: python train.py data.root=x")),
    Bad("data@elsewhere=digits", ("data@elsewhere=digits", "Did you mean to override data?")),
    Bad("hydra.foo=1", ("hydra.foo=1", "HydraConf")),
    Bad("hydra/launcher=rya", ("hydra/launcher=rya", "Options of hydra/launcher:", "basic")),
    Bad("--config-name nope", ("nope.yaml", "--help")),
    # types
    Bad("training.epochs=abc", ("training.epochs=abc", "a whole number or null", "Passes over the training set")),
    Bad("data.batch_size=1.5", ("data.batch_size=1.5", "a whole number")),
    Bad("data.val_fraction=half", ("data.val_fraction=half", "a number")),
    Bad("data.download=maybe", ("data.download=maybe", "true or false")),
    Bad("tags=quick", ("tags=quick", "a list, written [a,b]")),
    Bad("training=5", ("training=5", "a group of settings", "epochs")),
    Bad("seed=null", ("seed=null", "a whole number")),
    Bad("model.hidden.x=3", ("model.hidden.x=3", "Set model.hidden as a whole")),
    Bad("scaling.resources_per_worker=4", ("scaling.resources_per_worker=4", "a dictionary, written {a: 1}")),
    Bad("'scaling.resources_per_worker={cpu: 2}'", ("scaling.resources_per_worker.cpu=2", "scaling.resources_per_worker.CPU=2")),
    Bad("cluster=existing 'scaling.label_selector={zone: [a]}'", ("has the wrong type", "scaling.label_selector must be a dictionary")),
    Bad("cluster.slurm.partition=gpu", ("cluster.slurm.partition=gpu is for cluster=slurm", "Add cluster=slurm.")),
    Bad("cluster=kuberay resume=latest", ("cluster.kuberay.image=null",)),
    Bad("cluster=job resume=latest cluster.address=head", ("cluster.address=head must be the cluster's dashboard",)),
    # the command line itself
    Bad("training.epochs", ("training.epochs has no value", "training.epochs=3")),
    Bad("'model.hidden=[1'", ("model.hidden=[1", "Quote")),
    Bad("'name=a (b)'", ("name=a (b)", """'name="a (b)"'""")),
    Bad("training.epochs=1 training.epochs=2", ("training.epochs=1", "training.epochs=2", "leave one out")),
    Bad("model=mlp +model=mlp", ("model is given twice", "model=mlp", "+model=mlp")),
    Bad("training.epochs=1,2", ("training.epochs=1,2", "Add -m", "'training.epochs=[1,2]'")),
    Bad("'seed=range(1,3)'", ("seed=range(1,3)", "Add -m")),
    Bad("--epochs 3", ("--epochs is not an option", "epochs=value")),
    Bad("--lr=3", ("--lr=3 is not an option", "lr=value")),
    Bad("seed=1 -m seed=2", ("seed=2", "put options such as -m before all settings")),
    Bad("--resolve", ("--resolve", "--cfg")),
    # interpolations and missing values
    Bad("'data.name=${data.nmae}'", ("data.name cannot be resolved", "${data.nmae}", "Did you mean ${data.name}?")),
    Bad("'name=${oc.env:NOT_SET_HERE}'", ("name", "NOT_SET_HERE is not set", ".env")),
    Bad("'name=${nope:1}'", ("name cannot be resolved", "nope")),
    Bad("'tags=[{_target_: []}]'", ("tags=", "has the wrong type", "a list")),
    Bad("'allowed_targets=[{_target_: null}]'", ("allowed_targets=", "has the wrong type", "a list")),
    Bad("'recipe.metrics=[{a: 1}]'", ("recipe.metrics=", "has the wrong type", "a list")),
    Bad("scheduler.unit=null", ("scheduler.unit=null must be one of step, epoch, validation",)),
    Bad("'objective=${name}'", ("objective=None has the wrong type", "a group of settings")),
    Bad("'tracking.wandb=${oc.env:HOME}'", ("tracking.wandb=", "a group of settings, enabled")),
    Bad("data.num_classes=???", ("data.num_classes=??? is to be set", "a whole number", "Number of classes")),
    # values
    Bad("training.epochs=0", ("training.epochs=0", ">= 1")),
    Bad("name=../up training.precision=fp8", ("2 problems", "'../up'", "fp8", "bf16")),
    Bad("objective.metric=val/acc", ("objective.metric=val/acc", "did you mean objective.metric=val/accuracy?")),
    Bad("model._target_=subprocess.run", ("model._target_=subprocess.run", "can run anything")),
    # multirun: every job gets its turn, and the first failure is the exit code
    Bad("-m model=mlp,mlpp storage.path=../sweep", ("model=mlpp does not exist", "model=mlp")),
    Bad("-m training.epochs=0,-1 storage.path=../sweep", ("training.epochs=0", "training.epochs=-1", ">= 1")),
    # searches
    Bad("search=ahsa", ("search=ahsa does not exist", "Did you mean search=asha?", "Try: python train.py search=asha")),
    Bad("search=asha search/algorithm=optunaa", ("search/algorithm=optunaa", "Try: python train.py search=asha search/algorithm=optuna")),
    Bad("search/space=null", ("search/space=null", "a group has one of its options", "none")),
    Bad("'optimizer.lr=loguniform(1e-4,1e-1)'", ("below search.space", "search=random 'search.space.optimizer.lr=loguniform(1e-4,1e-1)'")),
    Bad("'optimizer.lr=choice(0.1,0.2)'", ("Add -m", "search=random 'search.space.optimizer.lr=choice(0.1,0.2)'")),
    Bad("search=asha '~search.space.data.bach_size'", ("search.space.data.bach_size", "search.space.data.batch_size")),
    Bad("search=asha 'search.space.optimizer.lrr=uniform(0.1,1)'",
        ("search.space.optimizer.lrr=uniform(0.1,1)", "Did you mean search.space.optimizer.lr?")),
    Bad("search=asha 'search.space.modle=choice(mlp,cnn)'", ("search.space.modle", "Did you mean search.space.model?")),
    Bad("search=asha 'search.space.model=choice(mlp, cn)'", ("search.space.model=choice(mlp, cn)", "Did you mean cnn?")),
    Bad("search=asha 'search.space.optimizer.lr=loguni(1e-4, 1)'", ("optimizer.lr=loguni(1e-4, 1)", "Did you mean loguniform?")),
    Bad("search=asha 'search.space.optimizer.lr=loguniform(0, 1)'", ("lower=0", "above 0", "Set lower=0.001")),
    Bad("search=asha 'search.space.optimizer.lr=uniform(-1, 1)'", ("search.space.optimizer.lr=uniform(-1, 1)", "lr=-1.0", "> 0")),
    Bad("search=asha 'search.space.data.batch_size=uniform(32, 64)'", ("data.batch_size must be a whole number", "randint(32, 65)")),
    Bad("search=asha 'search.space.training.precision=choice(fp32, bf61)'", ("training.precision=bf61", "Did you mean training.precision=bf16?")),
    Bad("search=asha search.space.seed=3", ("search.space.seed=3", "a value and no domain", "choice(32, 64)")),
    Bad("search=asha 'search.space.scaling.num_workers=choice(1,2)'", ("search.space.scaling.num_workers", "speed", "Leave it out")),
    Bad("search=asha 'search.space.training.test=choice(true,false)'", ("search.space.training.test", "test split")),
    Bad("search=asha 'search.space.seed=uniform(0)' 'search.space.name=choice(a,b)'", ("2 problems", "lacks upper", "label")),
    Bad("search=asha optimizer.lr=0.1", ("optimizer.lr=0.1 sets what", "search.space.optimizer.lr=null")),
    Bad("search=asha search/space=none", ("search.space is empty", "search/space=default")),
    Bad("search=asha 'search.points_to_evaluate=[{optimizer: {lr: 5}}]'",
        ("search.points_to_evaluate[0]", "optimizer.lr=5", "loguniform(1e-4, 1e-1)")),
    Bad("-m search=asha 'search.space.seed=choice(1)' storage.path=../sweep", ("search.space.seed=choice(1)", "has one value")),
    Bad("experiment=tuned", ("search.space.model.choice.mlp.depth", "model=mlp has no setting model.depth"),
        files={"conf/experiment/tuned.yaml": "# @package _global_\ndefaults:\n  - override /search: random\nsearch:\n  space:\n"
               "    model.choice.mlp.depth: randint(1, 5)\n    model.choice.cnn: {}\n"}),
    Bad("search=random data.micro_batch_size=32 'search.space.data=choice(digits,tiny)' search.space.data.batch_size=null",
        ("search.space with data=tiny", "data.micro_batch_size=32", "data.batch_size=8"),
        files={"conf/data/tiny.yaml": "defaults: [digits]\nbatch_size: 8\n"}),
    Bad("search=asha search/space=mine", ("search.space.optimizer.lr is given twice", "leave one out"),
        files={"conf/search/space/mine.yaml": "optimizer.lr: uniform(0.1, 1)\noptimizer: {lr: 'choice(1, 2)'}\n"}),
    # files
    Bad("experiment=broken", ("conf/experiment/broken.yaml", "trainig is not a setting", "Did you mean training?"),
        files={"conf/experiment/broken.yaml": "# @package _global_\ntrainig: {epochs: 3}\n"}),
    Bad("experiment=broken", ("conf/experiment/broken.yaml", "training.epochs must be a whole number"),
        files={"conf/experiment/broken.yaml": "# @package _global_\ntraining: {epochs: many}\n"}),
    Bad("experiment=broken", ("model=mpl does not exist", "Did you mean model=mlp?", "named in a file of conf/"),
        files={"conf/experiment/broken.yaml": "# @package _global_\ndefaults:\n  - override /model: mpl\n"}),
    Bad("experiment=nope", ("experiment=nope does not exist", "Options of experiment:", "mine"),
        files={"conf/experiment/mine.yaml": "# @package _global_\nseed: 1\n"}),
    Bad("model=broken", ("broken.yaml, line 2", "not valid YAML"), files={"conf/model/broken.yaml": "a: 1\n b: 2\n"}),
    Bad("", (".env, line 3", "NAME=value"), files={".env": "# fine\nGOOD=1\nhunter2 has no name\n"}),
    Bad("", (".env, line 2", "UTF-8"), files={".env": b"GOOD=1\nKEY=caf\xe9\n"}),
    Bad("", (".env cannot be read",), files={".env": None}),
]  # fmt: skip

FIFTY = ", ".join(map(str, range(1, 51)))
MANY = " ".join(
    f"'++search.space.{key}=\"grid_search({FIFTY})\"'" for key in ("seed", "optimizer.lr", "data.batch_size")
)
VALUES = [
    Bad("seed=4294967296", ("seed=4294967296", "<= 4294967295")),
    Bad("data.batch_size=0", ("data.batch_size=0", ">= 1")),
    Bad("data.micro_batch_size=much", ("data.micro_batch_size=much", "auto")),
    Bad("data.micro_batch_size=auto scaling.strategy=fsdp2 scaling=cpu", ("data.micro_batch_size=auto", "fsdp2", "data.micro_batch_size=8")),
    Bad("data.micro_batch_size=128", ("data.micro_batch_size=128", "data.batch_size=64", "null")),
    Bad("data.val_fraction=nan", ("data.val_fraction=nan", "finite", "> 0 and < 1")),
    Bad("data.input_shape=[]", ("data.input_shape=[]", "[3,32,32]")),
    Bad("data.input_shape=[1,-8,8]", ("data.input_shape=[1,-8,8]", ">= 1")),
    Bad("data.input_shape=[1000000,1000000]", ("data.input_shape=[1000000,1000000]", "[3,32,32]")),
    Bad("optimizer.lr=-1", ("optimizer.lr=-1", "> 0")),
    Bad("optimizer.lr=fast", ("optimizer.lr=fast is not a number", "> 0")),
    Bad("optimizer.lr=true", ("optimizer.lr=true is not a number", "> 0")),
    Bad("optimizer.lr=inf", ("optimizer.lr=inf", "finite")),
    Bad("optimizer.betas=[0.9,nan]", ("optimizer.betas[1]=nan", "finite")),
    Bad("optimizer.betas=[0.9,1.0]", ("optimizer.betas=[0.9,1.0]", "< 1")),
    Bad("+optimizer.momentum=1.5", ("optimizer.momentum=1.5", "< 1")),
    Bad("scheduler.unit=minute", ("scheduler.unit=minute", "step, epoch, validation")),
    Bad("training.epochs=null", ("training.epochs=null", "training.max_steps=null", "training.epochs=10")),
    Bad("training.ema.decay=1", ("training.ema.decay=1", "> 0 and < 1")),
    Bad("training.early_stopping.min_delta=inf", ("training.early_stopping.min_delta=inf", "finite")),
    Bad("training.precision=FP32", ("training.precision=FP32", "Did you mean training.precision=fp32?")),
    Bad("training.precision=fp16 scaling.use_gpu=false", ("training.precision=fp16", "training.precision=bf16")),
    Bad("training.precision=fp16 scaling=in_process", ("training.precision=fp16", "needs a GPU", "bf16")),
    Bad("objective.mode=maximum", ("objective.mode=maximum", "max, min")),
    Bad("objective.metric=val/loss", ("objective.mode=max", "worst val/loss", "Set objective.mode=min")),
    Bad("objective.mode=min", ("objective.mode=min", "worst val/accuracy", "Set objective.mode=max")),
    Bad("recipe.metrics=[]", ("objective.metric=val/accuracy", "recipe.metrics")),
    Bad("name=-rf", ("'-rf'", "starts with a letter or digit")),
    Bad("'name=\"a b\"'", ("'a b'", "a-b would do")),
    Bad("name=" + "x" * 81, ("up to 80",)),
    Bad("data.name=a/b", ("data.name='a/b'", "a-b would do")),
    Bad("tags=[good,.hidden]", ("tags[1]='.hidden'", "hidden would do")),
    Bad("allowed_targets=[my.package]", ("'my.package'", "without dots")),
    Bad("model._target_=mylab.Net", ("model._target_=mylab.Net", "allowed_targets=[manta,torch,torchvision,lightning,mylab]")),
    Bad("model._target_=Net", ("model._target_=Net",)),
    Bad("model._target_=torch.hub.load", ("model._target_=torch.hub.load", "can run anything")),
    Bad("optimizer._target_=torch.os.system", ("optimizer._target_=torch.os.system", "can run anything")),
    Bad("scheduler._target_=torch.nn.__init__", ("scheduler._target_=torch.nn.__init__", "dotted name")),
    Bad("recipe._target_=os.system", ("recipe._target_=os.system",)),
    Bad("data.dataset._target_=torch.load", ("data.dataset._target_=torch.load", "can run anything")),
    Bad("'data.transforms.train=[{p: 0.5}]'", ("data.transforms.train[0]._target_",)),
    Bad("'+model.head={_target_: torch.load}'", ("model.head._target_=torch.load", "can run anything")),
    Bad("scaling.num_workers=two", ("scaling.num_workers=two", "auto", "0 = in this process")),
    Bad("scaling.num_workers=null", ("scaling.num_workers=null", "auto")),
    Bad("scaling.num_workers=4 scaling.max_workers=2", ("scaling.max_workers=2", "scaling.num_workers=4")),
    Bad("scaling.max_workers=2", ("scaling.max_workers=2", "scaling.num_workers=auto")),
    Bad("scaling.num_workers=8 data.batch_size=4", ("data.batch_size=4", "scaling.num_workers=8", "Set")),
    Bad("scaling=elastic scaling.max_workers=99", ("data.batch_size=64", "scaling.max_workers=99")),
    Bad("scaling=in_process scaling.strategy=fsdp2", ("scaling.strategy=fsdp2", "scaling.strategy=ddp")),
    Bad("scaling.strategy=fsdp", ("scaling.strategy=fsdp", "Did you mean scaling.strategy=fsdp2?")),
    Bad("scaling.placement_strategy=pack", ("scaling.placement_strategy=pack", "scaling.placement_strategy=PACK")),
    Bad("+scaling.resources_per_worker.cpu=2", ("cpu=2", "scaling.resources_per_worker.CPU=2")),
    Bad("scaling.resources_per_worker.CPU=-2", ("scaling.resources_per_worker.CPU=-2", ">= 0")),
    Bad("scaling.use_gpu=false 'scaling.resources_per_worker={GPU: 1}'", ("scaling.use_gpu=false", "GPU=1")),
    Bad("cluster.kind=locl", ("cluster.kind=locl", "Did you mean cluster.kind=local?")),
    Bad("cluster=existing cluster.address=null", ("cluster.address=null", "host:port")),
    Bad("cluster=existing cluster.address=ray://host:10001", ("ray://host:10001", "cluster=job")),
    Bad("cluster=job cluster.address=host:8265", ("cluster.address=host:8265", "http://head:8265")),
    Bad("cluster=slurm cluster.address=auto", ("cluster.address=auto", "cluster=existing")),
    Bad("cluster=existing cluster.address=host", ("cluster.address=host", "host:port")),
    Bad("scaling.label_selector.zone=a", ("scaling.label_selector={'zone': 'a'}", "cluster=existing")),
    Bad("cluster=existing 'scaling.label_selector={zone: -a}'", ("scaling.label_selector.zone=-a", "!value, in(a, b)")),
    Bad("cluster=existing 'cluster.env_vars=[NO_SUCH]'", ("cluster.env_vars: NO_SUCH is not set here", "export NO_SUCH")),
    Bad("cluster=existing cluster.num_cpus=4", ("cluster.num_cpus=4", "null")),
    Bad("cluster.min_nodes=2", ("cluster.min_nodes=2", "cluster=existing")),
    Bad("cluster.address=auto", ("cluster.address=auto", "cluster=existing")),
    Bad("cluster.object_store_memory=1000", ("cluster.object_store_memory=1000", ">= 78643200")),
    Bad("tracking=wandb tracking.wandb.mode=ofline", ("tracking.wandb.mode=ofline", "online, offline, disabled")),
    Bad("tracking.watch=weights tracking=wandb", ("tracking.watch=weights", "gradients, parameters, all")),
    Bad("tracking.watch=all", ("tracking.watch=all", "tracking=wandb")),
    Bad("tracking.watch=all tracking=wandb scaling.strategy=fsdp2", ("tracking.watch=all", "fsdp2")),
    Bad("tracking=mlflow tracking.mlflow.tracking_uri=http://me:hush@host", ("has a password", "MLFLOW_TRACKING_URI")),
    Bad("tracking=mlflow tracking.mlflow.tracking_uri=./mlruns", ("./mlruns", "http://host:port", "sqlite:///")),
    Bad("tracking=wandb tracking.wandb.project=a/b", ("tracking.wandb.project=a/b",)),
    Bad("tracking=mlflow tracking.mlflow.experiment_name=", ("tracking.mlflow.experiment_name",)),
    Bad("tracking=mlflow tracking.mlflow.tracking_uri=http://127.0.0.1:notaport", ("tracking_uri=http://127.0.0.1:notaport", "http://host:port", "Port could not be cast")),
    Bad("tracking=mlflow tracking.mlflow.tracking_uri=http://:5000", ("http://:5000", "names no host")),
    Bad(f"tracking=mlflow tracking.mlflow.experiment_name={'x' * 600}", ("experiment_name has 600 characters", "MLflow takes 500")),
    Bad(f"tracking=wandb tracking.wandb.project={'x' * 300}", ("tracking.wandb.project has 300 characters", "W&B takes 128")),
    Bad("'group=a b/c'", ("group=", "a-b-c would do")),
    Bad("optimizer.lr={1:2}", ("optimizer.lr={1: 2} is not a number",)),
    Bad("optimizer._target_={1:2}", ("optimizer._target_", "dotted name")),
    Bad("+model.deep={1:{_target_:os.system}}", ("model.deep.1._target_=os.system can run anything",)),
    Bad("cluster.wait_s=nan", ("cluster.wait_s=nan", "finite")),
    Bad("storage.path=/dev/null/runs", ("storage.path=/dev/null/runs", "/dev/null is not a folder")),
    Bad("'storage.path=\"\"'", ("storage.path=''", "folder")),
    Bad("data.root=/dev/null", ("data.root=/dev/null", "no folder or file that can be read")),
    # searches: what is asked for
    Bad("search.num_samples=8", ("search.num_samples=8 is for a search", "add search=random")),
    Bad("'+search.space.optimizer.lr=3' search.refit=false", ("search.space.optimizer.lr=3 is", "search.refit=false is for a search")),
    Bad("search/scheduler=asha", ("search/scheduler=asha is for a search", "search=asha")),
    Bad("search=asha +search.algorithm.gamma=0.1", ("search.algorithm.gamma=0.1 is not an argument of random", "It takes none")),
    Bad("search=asha +search.scheduler.max_time=3", ("search.scheduler.max_time=3 is not an argument of asha", "Did you mean search.scheduler.max_t?")),
    Bad("search=asha search.scheduler.max_t=ten", ("search.scheduler.max_t=ten", "a whole number or null")),
    Bad("search=asha search.scheduler.grace_period=1.5", ("search.scheduler.grace_period=1.5", "a whole number")),
    Bad("search=pbt search.scheduler.synch=1", ("search.scheduler.synch=1", "true or false")),
    Bad("search=asha search.scheduler.name=ahsa", ("search.scheduler.name=ahsa must be one of", "Did you mean search.scheduler.name=asha?")),
    Bad("search=asha search.algorithm.name=rnd", ("search.algorithm.name=rnd must be one of random, grid",)),
    Bad("search=asha search.algorithm.name=null", ("search.algorithm.name=null must be one of",)),
    # how long
    Bad("search=random search.num_samples=null", ("search.num_samples=null", "never end", "search.num_samples=20")),
    Bad("search=asha search.scheduler.max_t=99", ("search.scheduler.max_t=99", "training.epochs=15", "max_t=null")),
    Bad("search=asha search.scheduler.grace_period=16", ("search.scheduler.grace_period=16", "15 epochs")),
    Bad("search=asha training.epochs=null training.max_steps=9", ("search.scheduler.max_t=null", "training.epochs=10")),
    # which domains
    Bad("search=grid search.num_samples=8", ("search.num_samples=8", "6 combinations", "search.num_samples=null")),
    Bad("search=grid search/space=default", ("optimizer.lr=loguniform(1e-4, 1e-1)", "grid_search(0.0001, 0.1)", "search/algorithm=random")),
    Bad("search=random search.num_samples=1 'search.points_to_evaluate=[{data: {batch_size: 32}},{data: {batch_size: 64}}]'",
        ("search.points_to_evaluate has 2 points", "search.num_samples=1", "Set search.num_samples=2")),
    Bad("search=grid 'search.points_to_evaluate=[{seed: 1}]'", ("search.points_to_evaluate", "Leave it out")),
    Bad("search=grid search/space=none " + MANY, ("125,000 combinations, too many", "search/algorithm=random")),
    Bad("search=random search/space=grid", ("grid_search(32, 128) is for search/algorithm=grid", "'choice(32, 128)'")),
    Bad("search=bayesopt search/space=default", ("choice(32, 64, 128): search/algorithm=bayesopt", "uniform(0.0001, 0.1)")),
    Bad("search=optuna '++search.space.optimizer.lr=\"randn(1, 0.1)\"'", ("knows no normal distributions", "hyperopt")),
    Bad("search=optuna '++search.space.optimizer.lr=\"qloguniform(0.1, 1, 0.1)\"'", ("would ignore q=0.1", "Set loguniform(0.1, 1)")),
    Bad("search=bohb '++search.space.optimizer.lr=\"quniform(0.1, 1, 0.1)\"'", ("would ignore q=0.1", "Set uniform(0.1, 1)")),
    # population based training
    Bad("search=pbt search/algorithm=optuna", ("search/scheduler=pbt", "search/algorithm=optuna does not go", "search/algorithm=random")),
    Bad("search=pbt search.num_samples=1", ("search.num_samples=1 is the population", "2 or more")),
    Bad("search=pbt search/space=none '++search.space.seed=\"choice(1, 2)\"'", ("nothing that search/scheduler=pbt can change", "search/space=pbt")),
    Bad("search=pb2 '++search.space.optimizer.lr=\"choice(0.1, 0.2)\"'", ("pb2 needs continuous bounds", "uniform(0.1, 0.2)")),
    # what goes together
    Bad("search=random search/scheduler=bohb", ("search/scheduler=bohb", "need each other", "search=bohb")),
    Bad("search=bohb search/scheduler=none", ("search/algorithm=bohb", "search=bohb for both")),
    Bad("search=asha scaling=in_process", ("scaling.num_workers=0", "on Ray", "scaling=auto")),
    Bad("search=asha scaling=elastic", ("scaling.max_workers=2", "scaling.max_workers=null")),
    Bad("search=asha training.profile=true", ("training.profile=true", "training.profile=false")),
]  # fmt: skip

# What only the launch can know: the machine, the plug-ins, the data, the run to resume. {here} is the folder of a
# finished run and of FOLDERS; where Ray would be used, it must not have been started.
IN, FOLDER = "scaling=in_process ", "scaling=in_process data=image_folder data.num_classes=2 data.root={here}/"
TRANSFORM = IN + "'data.transforms.train=[{{_target_: torchvision.transforms.v2.{}}}]'"
LAUNCHES = [
    # the machine
    Bad("scaling=multi_gpu", ("scaling.use_gpu=true", "this machine has none", "scaling=cpu", "cluster.num_gpus=2")),
    Bad("scaling=single_gpu", ("scaling.use_gpu=true", "cluster.num_gpus=1")),
    Bad("scaling=multi_node", ("scaling.use_gpu=true", "this machine has none")),
    Bad("scaling=in_process scaling.use_gpu=true", ("scaling.use_gpu=true", "this machine has none", "scaling.use_gpu=null")),
    Bad("scaling.accelerator_type=H100", ("scaling.accelerator_type=H100", "this machine has none")),
    Bad("scaling=cpu scaling.num_workers=3 cluster.num_cpus=2",
        ("scaling.num_workers=3", "2 CPU", "Set scaling.num_workers=2", "cluster.num_cpus=3")),
    Bad("scaling=elastic scaling.num_workers=3 scaling.max_workers=4 cluster.num_cpus=2", ("scaling.num_workers=3", "holds 2")),
    Bad("scaling=multi_gpu cluster.num_gpus=2 scaling.resources_per_worker.GPU=3", ("3 GPU", "2 GPU", "GPU=2, the most")),
    Bad("scaling=cpu scaling.placement_strategy=STRICT_SPREAD", ("STRICT_SPREAD", "scaling.placement_strategy=SPREAD")),
    Bad("scaling=multi_gpu cluster.num_gpus=4 cluster.num_cpus=4 data.batch_size=3", ("data.batch_size=3", "the 4 workers")),
    Bad("+scaling.resources_per_worker.X=1", ("1 X", "scaling.resources_per_worker.X=0")),
    Bad(IN + "storage.path=/proc/runs", ("storage.path=/proc/runs", "cannot be written", "storage.path=<folder>")),
    # plug-ins
    Bad(IN + "model._target_=manta.models.mlp.Nope", ("model._target_=manta.models.mlp.Nope", "does not exist")),
    Bad(IN + "model._target_=manta.models.mpl.MLP", ("model._target_=manta.models.mpl.MLP", "does not exist")),
    Bad(IN + "model._target_=manta.models.mlp", ("model._target_=manta.models.mlp", "is not a class or function")),
    Bad(IN + "model._target_=torch.add", ("model._target_=torch.add", "Of torch, plug-ins come from torch.nn, torch.optim")),
    Bad(IN + "'~model.hidden' '~model.dropout' '~model.input_shape' '~model.num_classes' +model.nonlinearity=relu model._target_=torch.nn.init.calculate_gain",
        ("model._target_=torch.nn.init.calculate_gain", "a float, not a torch.nn.Module")),
    Bad(IN + "model._target_=torch.nn.ReLU", ("model.input_shape is not an argument of ReLU", "inplace")),
    Bad(IN + "+model.hiden=[3]", ("model.hiden is not an argument of MLP", "Did you mean model.hidden?")),
    Bad(IN + "model.hidden=7", ("model.hidden=7 has the wrong type", "list[int]")),
    Bad(IN + "model.hidden=[-1]", ("hidden[0]=-1", "at least 1")),
    Bad(IN + "model.num_classes=3", ("[2, 3] instead of [2, 10]", "data.num_classes=10")),
    Bad(IN + "model.input_shape=[1,4,4]", ("cannot take a batch of shape [2, 1, 8, 8]",)),
    Bad(IN + "model=vit model.heads=7", ("dim=64 is not a multiple of heads=7",)),
    Bad(IN + "+optimizer.nope=1", ("optimizer.nope is not an argument of AdamW", "lr, betas")),
    Bad(IN + "optimizer._target_=torch.optim.AdamWW", ("torch.optim.AdamWW does not exist", "Did you mean 'AdamW'?")),
    Bad(IN + "scheduler.warmup=1000000", ("warmup=1000000", "leaves nothing of total=")),
    Bad(IN + "scheduler=plateau scheduler.unit=step", ("scheduler.unit=step", "scheduler.unit=validation")),
    Bad(IN + "recipe._target_=torch.nn.Identity", ("recipe._target_=torch.nn.Identity", "is no recipe", "evaluate")),
    Bad(IN + "objective.metric=val/f1 'recipe.metrics=[val/f1]'", ("objective.metric=val/f1", "val/loss, val/accuracy")),
    Bad(TRANSFORM.format("Nope"), ("data.transforms.train[0]._target_", "has no 'Nope'")),
    Bad(TRANSFORM.format("RandomCrop"), ("data.transforms.train[0]: RandomCrop", "'size'")),
    # data
    Bad(IN + "data.num_classes=7", ("data.num_classes=7", "digits has 10 classes", "'data.num_classes=10'")),
    Bad(IN + "data.input_shape=[1,9,9]", ("data.input_shape=[1, 9, 9]", "'data.input_shape=[1,8,8]'")),
    Bad(IN + "+data.dataset.nope=3", ("data.dataset.nope is not an argument of digits", "split_seed")),
    Bad(IN + "data=mnist data.download=false data.root={here}/empty", ("MNIST", "{here}/empty", "data.download=true")),
    Bad(FOLDER + "nowhere", ("data.root={here}/nowhere", "<class>/<image>")),
    Bad(FOLDER + "file/below", ("data.root={here}/file/below", "Not a directory", "<class>/<image>")),
    Bad(FOLDER + "file", ("data.root={here}/file: [Errno 20] Not a directory", "One folder a class is expected there")),
    Bad(FOLDER + "empty", ("data.root={here}/empty", "<class>/<image>")),
    Bad(FOLDER + "imageless", ("data.root={here}/imageless", "a, b", ".png", "<class>/<image>")),
    Bad(FOLDER + "mismatch", ("data.root={here}/mismatch", "b only in train", "c only in val")),
    Bad(FOLDER + "images data.num_classes=3", ("data.num_classes=3", "has 2 classes (a, b)", "'data.num_classes=2'")),
    # searches
    Bad("search=bohb", ("search.algorithm.name=bohb needs hpbandster and ConfigSpace", "pip install -e '.[bohb]'")),
    # the run to resume
    Bad("resume={here}/run 'tracking.csv=${data.name}'", ("tracking.csv=${data.name} has the wrong type", "a group of settings")),
    Bad("resume={here}/run 'tags=${data.nmae}'", ("tags=${data.nmae} has the wrong type, or leads nowhere", "a list")),
    Bad("resume={here}/nowhere", ("resume={here}/nowhere", "no such directory", "latest")),
    Bad("resume=latest", ("resume=latest", "there is no run under", "python train.py")),
    Bad("resume={here}/empty", ("resume={here}/empty", "is not a run directory", "config.yaml")),
    Bad("resume={here}/file", ("resume={here}/file", "is not a run directory")),
    Bad("resume={here}/other_schema", ("schema 7", "reads schema 1", "provenance.json")),
    Bad("resume={here}/no_yaml", ("{here}/no_yaml/config.yaml cannot be read", "line 1")),
    Bad("resume={here}/other_keys", ("{here}/other_keys/config.yaml is not a valid configuration", "modle")),
    Bad("resume={here}/half_status", ("{here}/half_status/status.json cannot be read",)),
    Bad("resume={here}/rubbish training.epochs=3", ("No checkpoint of {here}/rubbish is whole (step-00000002: state.pt has 7 bytes instead of ",)),
    *(
        Bad(f"resume={{here}}/run {change}", (f"{change.split()[-1]} cannot be changed on resume", "without resume="))
        for change in ("training.epochs=9 seed=3", "model=cnn", "model.hidden=[3]", "~model.dropout", "data=mnist",
                       "data.num_classes=3", "objective.metric=val/loss", "optimizer=sgd", "scheduler=step", "name=other",
                       "scheduler._target_=torch.optim.lr_scheduler.StepLR", "data.split_seed=5")
    ),
    Bad("resume={here}/run training.epochs=0", ("training.epochs=0", ">= 1")),
    Bad("resume={here}/run training.epochs=3 scaling=multi_gpu", ("scaling.use_gpu=true", "this machine has none")),
]  # fmt: skip

# Numbers just outside their bounds and just inside.
EDGES: dict[str, tuple[list[Any], list[Any]]] = {
    "schema_version": ([0, 2], [1]),
    "seed": ([-1, 2**32], [0, 2**32 - 1]),
    "data.input_shape": ([[0], [1, -1], [2**20 + 1]], [[1], [3, 224, 224]]),
    "data.num_classes": ([0, 10**7 + 1], [1, 21843]),
    "data.target_mean": ([-1e30, 1e30], [-5, 0, 1e9]),
    "data.target_std": ([0, -1, 1e30], [1e-6, 77.0]),
    "data.batch_size": ([0, 10**8 + 1], [1, 10**8]),
    "data.micro_batch_size": ([0], [1, "auto", None]),
    "data.eval_batch_size": ([0, 10**8 + 1], [1, None]),
    "data.num_workers": ([-1, 1025], [0, 64]),
    "data.prefetch_factor": ([0, 1025], [1]),
    "data.val_fraction": ([0.0, 1.0], [0.01, 0.99]),
    "data.split_seed": ([-1, 2**32], [0]),
    "model.dropout": ([-0.1, 1.0], [0, 0.9]),
    "optimizer.lr": ([0, -1.0, True, "high"], [1e-9, 30]),
    "optimizer.weight_decay": ([-1e-9], [0, 0.1]),
    "optimizer.momentum": ([-0.1, 1], [0, 0.99, None]),
    "optimizer.betas": ([[0.9, 1], [-0.1, 0.9]], [[0, 0.999]]),
    "optimizer.eps": ([0, -1e-8], [1e-8]),
    "scheduler.warmup": ([-1], [0, 0.05, 500]),
    "scheduler.total": ([0], [1, None]),
    "scheduler.min_ratio": ([-0.1, 1.1], [0, 1]),
    "training.epochs": ([0], [1, None]),
    "training.max_steps": ([0], [1, None]),
    "training.grad_clip_norm": ([0.0], [1e-3, None]),
    "training.label_smoothing": ([-0.1, 1.0], [0.0, 0.1]),
    "training.ema.decay": ([0.0, 1.0], [0.999]),
    "training.early_stopping.patience": ([0], [1, None]),
    "training.early_stopping.min_delta": ([-0.1], [0.0]),
    "training.checkpoint.every_n_steps": ([0], [1, None]),
    "training.checkpoint.every_s": ([0.0], [0.1, None]),
    "training.checkpoint.every_n_epochs": ([-1], [0]),
    "training.checkpoint.keep": ([0], [1]),
    "training.log_every_n_steps": ([0], [1]),
    "training.val_every_n_epochs": ([0], [1]),
    "training.limit_train_batches": ([0], [1, None]),
    "training.limit_eval_batches": ([0], [1, None]),
    "training.peak_flops": ([0, -1.0], [1e12, None]),
    "training.overfit_batches": ([0], [1, None]),
    "scaling.num_workers": ([-1, 100001], [0, 1, "auto"]),
    "scaling.max_workers": ([0, 100001], [1, None]),
    "scaling.max_failures": ([-2], [-1, 0]),
    "scaling.max_preemption_failures": ([-2], [-1, 0]),
    "scaling.controller_failure_limit": ([-2], [-1, 0, None]),
    "scaling.timeout_s": ([0, 10**9], [0.5, None]),
    "cluster.num_cpus": ([0, 100001], [1, None]),
    "cluster.num_gpus": ([-1, 10001], [0, None]),
    "cluster.object_store_memory": ([75 * 2**20 - 1], [75 * 2**20, None]),
    "cluster.wait_s": ([-1.0], [0.0]),
    "cluster.min_nodes": ([0], [1, None]),
    "cluster.kuberay.head_cpu": ([0], [1]),
    "cluster.kuberay.head_gpu": ([-1], [0]),
    "cluster.kuberay.worker_cpu": ([0], [1]),
    "cluster.kuberay.worker_gpu": ([-1], [0, None]),
    "cluster.kuberay.replicas": ([0, 10001], [1, None]),
    "cluster.kuberay.max_replicas": ([0, 10001], [1, None]),
    "cluster.kuberay.idle_timeout_seconds": ([0], [1]),
    "cluster.kuberay.ttl_seconds_after_finished": ([-1], [0]),
    "cluster.kuberay.active_deadline_seconds": ([0], [1, None]),
    "cluster.kuberay.backoff_limit": ([-1], [0]),
    "cluster.cloud.head_cpus": ([-1], [0]),
    "cluster.cloud.head_gpus": ([-1], [0]),
    "cluster.cloud.worker_cpus": ([0], [1]),
    "cluster.cloud.worker_gpus": ([-1], [0]),
    "cluster.cloud.min_workers": ([0, 10001], [1, None]),
    "cluster.cloud.max_workers": ([0, 10001], [1, None]),
    "cluster.cloud.idle_timeout_minutes": ([0.0], [0.1]),
    "cluster.cloud.disk_gb": ([0], [1]),
    "cluster.slurm.nodes": ([0, 100001], [1, 100000]),
    "cluster.slurm.cpus_per_task": ([0], [1, None]),
    "cluster.slurm.signal_s": ([9, 65536], [10, 65535]),
    "cluster.slurm.max_requeues": ([-1], [0]),
    "cluster.slurm.max_array_tasks": ([0], [1, None]),
    "search.num_samples": ([0, 10**6 + 1], [1, None]),
    "search.time_budget_s": ([0.0], [0.1, None]),
    "scaling.elastic_resize_monitor_interval_s": ([0.9], [1.0]),
    "storage.finish_s": ([-1.0], [0.0]),
    "tracking.finish_s": ([0.0], [0.1]),
    "search.max_concurrent_trials": ([0], [1, None]),
    "search.seed": ([-1, 2**32], [0]),
    "search.max_failures": ([-1], [0]),
    "search.refit_seeds": ([0, 1001], [1]),
    "search.algorithm.n_startup_trials": ([0], [1, None]),
    "search.algorithm.n_initial_points": ([0], [1, None]),
    "search.algorithm.gamma": ([0, 1.0], [0.5]),
    "search.algorithm.random_search_steps": ([0], [1]),
    "search.scheduler.max_t": ([0], [1, None]),
    "search.scheduler.grace_period": ([0], [1]),
    "search.scheduler.reduction_factor": ([1, 0.5], [1.5, 3]),
    "search.scheduler.brackets": ([0], [1]),
    "search.scheduler.min_samples_required": ([0], [1]),
    "search.scheduler.perturbation_interval": ([0], [1]),
    "search.scheduler.burn_in_period": ([-1], [0]),
    "search.scheduler.quantile_fraction": ([0, 0.51], [0.5]),
    "search.scheduler.resample_probability": ([-0.1, 1.1], [0, 1]),
}


@dataclass(frozen=True)
class Answer:
    """What a command did."""

    code: int
    out: str
    error: str
    modules: set[str]
    new_files: list[str]


def train(tmp_path: Path, arguments: str, root: Path = ROOT, env: Mapping[str, str] | None = None) -> Answer:
    """Run train.py in an empty folder and watch what it imports and leaves behind."""
    watch, here = tmp_path / "watch", tmp_path / "here"
    watch.mkdir()
    here.mkdir()
    (watch / "sitecustomize.py").write_text(WATCH)
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    kept["PYTHONPATH"] = os.pathsep.join([str(watch), str(ROOT / "src"), kept.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    before = set(_files(here) + _files(root / "outputs"))
    done = subprocess.run(
        [sys.executable, str(root / "train.py"), *shlex.split(arguments)],
        env={**kept, "MODULES_FILE": str(watch / "modules"), "PYTHONDONTWRITEBYTECODE": "1", **(env or {})},
        cwd=here, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    new = sorted(set(_files(here) + _files(root / "outputs")) - before)
    return Answer(done.returncode, done.stdout, done.stderr, set((watch / "modules").read_text().split()), new)


def project(tmp_path: Path, files: Mapping[str, str | bytes | None]) -> Path:
    """A copy of train.py and conf/ with these files added."""
    root = tmp_path / "project"
    shutil.copytree(ROOT / "conf", root / "conf")
    shutil.copy(ROOT / "train.py", root)
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def _files(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*")]


def assert_says(message: str, fragments: tuple[str, ...]) -> None:
    for fragment in fragments:
        assert fragment.lower() in message.lower(), f"{fragment!r} is not in:\n{message}"


@pytest.mark.parametrize("bad", COMMANDS, ids=lambda bad: f"{bad.arguments or next(iter(bad.files))}")
def test_a_bad_command_is_refused(tmp_path: Path, bad: Bad) -> None:
    root = project(tmp_path, bad.files) if bad.files else ROOT
    answer = train(tmp_path, bad.arguments, root, bad.env)
    assert answer.code == INVALID, answer.error
    assert_says(answer.error, bad.says)
    assert "Traceback" not in answer.error
    assert "Error: " in answer.error
    assert answer.out == "" or bad.arguments.startswith("-m")  # Hydra lists a multirun's jobs
    assert answer.new_files == []
    assert not (bad.light and HEAVY & answer.modules)


@pytest.fixture(scope="module", autouse=True)
def _schema() -> None:
    register()


@pytest.mark.parametrize("bad", VALUES, ids=lambda bad: bad.arguments)
def test_a_bad_value_is_refused(bad: Bad) -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = from_hydra(compose("config", with_domains(shlex.split(bad.arguments))))
    with pytest.raises(MantaError) as error:
        check(config)
    assert_says(str(error.value), bad.says)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, damaged copies of it, and folders of images."""
    folder = tmp_path_factory.mktemp("here")
    lab = Lab(folder / "runs")
    run = lab.run("scaling=in_process", "training.epochs=1", "training.limit_train_batches=2")
    run.path.rename(folder / "run")
    shutil.rmtree(folder / "runs")
    config = (folder / "run" / "config.yaml").read_text()
    for name, file, content in (
        ("other_schema", "config.yaml", config.replace("schema_version: 1", "schema_version: 7")),
        ("no_yaml", "config.yaml", "a: [1\n"),
        ("other_keys", "config.yaml", config + "modle: {}\n"),
        ("half_status", "status.json", '{"state": "fini'),
        ("rubbish", "checkpoints/step-00000002/state.pt", "rubbish"),
    ):
        shutil.copytree(folder / "run", folder / name, symlinks=True)
        assert (folder / name / file).is_file()
        (folder / name / file).write_text(content)
    (folder / "file").touch()
    (folder / "empty").mkdir()
    for path in ("imageless/train/a", "imageless/train/b"):
        (folder / path).mkdir(parents=True)
    for path in ("train/a", "train/b", "val/a", "val/c", "test/a", "test/b"):
        image(folder / "mismatch" / path)
    for path in ("train/a", "train/b", "val/a", "val/b", "test/a", "test/b"):
        image(folder / "images" / path)
    return folder


def launch_from(*arguments: str) -> int:
    config, previous, space = compose_run(*arguments)
    return launch(config, list(arguments), previous, space).code


def image(folder: Path) -> None:
    folder.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(folder / "1.png")


@pytest.mark.parametrize("bad", LAUNCHES, ids=lambda bad: bad.arguments)
def test_a_bad_launch_is_refused(
    tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bad: Bad
) -> None:
    """Before Ray is started; no run directory is made, and the run that was to be resumed is as it was."""
    monkeypatch.setattr("manta.plan.gpu_count", lambda: 0)
    monkeypatch.setattr("manta.launch.is_shared", lambda: False)
    monkeypatch.setattr("manta.launch.connect", lambda *_: pytest.fail("Ray would be started"))
    arguments = shlex.split(bad.arguments.replace("{here}", str(here)))
    storage = [] if any(word.startswith("storage.path=") for word in arguments) else [f"storage.path={tmp_path}"]
    before = [path.read_bytes() for path in sorted(here.glob("*/config.yaml"))]
    with pytest.raises(MantaError) as error:
        launch_from(*storage, *arguments)
    assert error.value.code == INVALID
    assert_says(str(error.value), tuple(fragment.replace("{here}", str(here)) for fragment in bad.says))
    assert list(tmp_path.iterdir()) == []
    assert [path.read_bytes() for path in sorted(here.glob("*/config.yaml"))] == before
    assert "Traceback" not in "".join(capsys.readouterr())


def test_a_running_run_is_not_resumed(tmp_path: Path, here: Path) -> None:
    shutil.copytree(here / "run", tmp_path / "run", symlinks=True)
    run = RunDir(tmp_path / "run")
    run.update_status(state="running", pid=os.getpid())
    with writing(run), pytest.raises(MantaError) as error:
        compose_run(f"resume={run}", "training.epochs=3")
    assert_says(str(error.value), (f"resume: {run} is running right now (pid {os.getpid()}", "Ctrl-C"))
    assert error.value.code == INVALID


@pytest.mark.parametrize("scaling", ["in_process", "cpu"])
def test_a_plan_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], scaling: str
) -> None:
    """And starts nothing."""
    monkeypatch.setattr("manta.launch.is_shared", lambda: False)
    monkeypatch.setattr("manta.launch.connect", lambda *_: pytest.fail("Ray would be started"))
    settings = (
        f"scaling={scaling}",
        "cluster.num_cpus=6",
        "plan=true",
        "training.epochs=10",
        f"storage.path={tmp_path}",
    )
    assert launch(compose_run(*settings)[0], []).code == FINISHED
    workers = {"in_process": "none: in this process", "cpu": "2 on CPU, 3 CPU each, ddp"}[scaling]
    assert_says(capsys.readouterr().out, ("Plan\n", "MLP, 50,826 parameters", "train 1,437", "230 steps", workers))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def defaults(_schema: None) -> Config:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return from_hydra(compose("config"))


def test_every_bound_has_its_edges() -> None:
    assert set(EDGES) == set(NUMBERS)


@pytest.mark.parametrize("key", EDGES)
def test_numbers_outside_their_bounds_are_refused(defaults: Config, key: str) -> None:
    def problems(value: Any) -> list[str]:
        config = copy.deepcopy(defaults)
        *groups, name = key.split(".")
        owner: Any = config
        for group in groups:
            owner = getattr(owner, group)
        if isinstance(owner, dict):
            owner[name] = value
        else:
            setattr(owner, name, value)
        return list(numbers(config))

    outside, inside = EDGES[key]
    for value in outside:
        (problem,) = problems(value)
        assert problem.startswith(f"{key}=")
        assert "It must be " in problem
    assert [problems(value) for value in inside] == [[] for _ in inside]


def test_a_broken_env_file_keeps_its_secrets(tmp_path: Path) -> None:
    answer = train(tmp_path, "", project(tmp_path, {".env": "API_KEY hunter2\n"}))
    assert "line 1" in answer.error
    assert "hunter2" not in answer.error + answer.out


@pytest.mark.parametrize(("arguments", "env"), [("traceback=true", {}), ("", {"HYDRA_FULL_ERROR": "1"})])
@pytest.mark.parametrize("mistake", ["modle=mlp", "training.epochs=0"])
def test_tracebacks_are_shown_when_asked_for(
    tmp_path: Path, arguments: str, env: Mapping[str, str], mistake: str
) -> None:
    answer = train(tmp_path, f"{mistake} {arguments}", env=env)
    assert answer.code == INVALID
    assert_says(answer.error, ("Traceback", f"Error: {mistake}"))


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ("--help", ("Groups and their options", "model: ", "scaling: auto, cpu", "resume=latest")),
        ("--hydra-help", ("--multirun",)),
        ("--cfg job", ("batch_size: 64", "${data.input_shape}")),
        ("--cfg job --resolve -p model", ("num_classes: 10",)),
        ("--cfg hydra", ("launcher:",)),
        ("--info defaults", ("model",)),
        ("-sc install=bash", ("hydra_bash_completion",)),
    ],
)
def test_help_is_light(tmp_path: Path, arguments: str, fragments: tuple[str, ...]) -> None:
    answer = train(tmp_path, arguments)
    assert answer.code == FINISHED, answer.error
    assert_says(answer.out, fragments)
    assert not HEAVY & answer.modules
    assert answer.new_files == []


def test_tab_completion(tmp_path: Path) -> None:
    line = "python train.py model=ml"
    answer = train(tmp_path, "-sc query=bash", env={"COMP_LINE": line, "COMP_POINT": str(len(line))})
    assert answer.code == FINISHED, answer.error
    assert answer.out.split() == ["model=mlp"]
    assert not HEAVY & answer.modules


def test_our_own_mistakes_keep_their_traceback(tmp_path: Path) -> None:
    broken = project(tmp_path, {"src/manta_broken.py": ""})
    source = (broken / "train.py").read_text().replace("from manta.request import run", "raise KeyError('a bug')")
    (broken / "train.py").write_text(source)
    answer = train(tmp_path, "", broken)
    assert answer.code == FAILED
    assert_says(answer.error, ("Traceback", "KeyError: 'a bug'"))

"""`_target_`: the one helper that finds, checks and builds what a researcher plugs in."""

import importlib
import importlib.machinery
import inspect
import sys
import sysconfig
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from manta.errors import MantaError, nearest

# Where plug-ins come from in our own package and in torch's. Elsewhere in them is what runs programs, deletes, downloads,
# or loads and writes whatever it is given, under more names than a list of forbidden ones could hold.
ROOMS = {
    "lightning": ("pytorch.callbacks",),
    "manta": ("data", "models", "recipes", "training"),
    "torch": ("nn", "optim"),
    "torchvision": ("models", "ops", "transforms"),
}
ALLOWED_TARGETS = "MANTA_ALLOWED_TARGETS"
"""In the environment: installed packages, besides Manta's, that a saved configuration may name; a launch hands its own on."""
FOREIGN = {"builtins", "ctypes", "importlib", "os", "pickle", "runpy", "shutil", "socket", "subprocess", "sys"}


def split(spec: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A plug-in's config as (target, arguments)."""
    return str(spec["_target_"]), {key: value for key, value in spec.items() if key != "_target_"}


def check_allowed(key: str, spec: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Refuse a missing `_target_` or one outside the allow-list; imports nothing.

    Raises:
        MantaError: naming `key`, the target and the allowed packages.
    """
    target = spec.get("_target_")
    if not isinstance(target, str) or not target:
        raise MantaError(
            f"{key}._target_ is {target!r}: it must be the dotted name of a class or function, e.g. manta.models.mlp.MLP."
        )
    parts = target.split(".")
    room = next((rooms for package, rooms in ROOMS.items() if package == parts[0]), None)
    inside = room is None or any(target.startswith(f"{parts[0]}.{name}.") for name in room)
    if FOREIGN & set(parts) or parts[0] in sys.stdlib_module_names or (parts[0] in allowed and not inside):
        few = f" Of {parts[0]}, plug-ins come from {', '.join(f'{parts[0]}.{name}' for name in room)}." if room else ""
        raise MantaError(
            f"{key}._target_={target} can run anything, or is no plug-in.{few} Call it in a function of your own and name that one."
        )
    if not all(part.isidentifier() and not part.startswith("__") for part in parts):
        raise MantaError(f"{key}._target_={target} must be the dotted name of a class or function.")
    if parts[0] not in allowed or len(parts) < 2:
        raise MantaError(
            f"{key}._target_={target} is outside the allowed packages ({', '.join(allowed)}). "
            f"If you trust it: 'allowed_targets=[{','.join([*allowed, parts[0]])}]', in conf/config.yaml for good; for the "
            f"scripts of a run that was given it on the command line: {ALLOWED_TARGETS}={parts[0]} python scripts/..."
        )


def is_own(package: str) -> bool:
    """Whether a package is the project's own code: not Python's, not installed beside it. Imports nothing."""
    if package in ROOMS:
        return True
    try:
        spec = importlib.machinery.PathFinder.find_spec(package)
    except (ImportError, ValueError):
        return False
    places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return any(places) and not any(place.startswith(installed) for place in places)


def locate(key: str, target: str, allowed: Sequence[str]) -> Callable[..., Any]:
    """Import a target.

    Raises:
        MantaError: it does not exist, cannot be called, or is only re-exported by an allowed package.
    """
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:cut])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
                continue
            raise MantaError(
                f"{key}._target_={target}: importing {module_name} needs {error.name}, not installed."
            ) from error
        for name in parts[cut:]:
            if not hasattr(found, name):
                hint = nearest(name, dir(found))
                raise MantaError(
                    f"{key}._target_={target} does not exist: {getattr(found, '__name__', module_name)} has no {name!r}."
                    + (f" Did you mean {hint!r}?" if hint else "")
                )
            found = getattr(found, name)
        home = getattr(found, "__module__", None) or ""
        if not callable(found) or home.split(".")[0] not in allowed:
            raise MantaError(f"{key}._target_={target} is not a class or function of {', '.join(allowed)}.")
        check_allowed(key, {"_target_": f"{home}.{found.__name__}"}, allowed)  # torch.nn.x.torch.load is torch.load
        return typing.cast(Callable[..., Any], found)
    raise MantaError(f"{key}._target_={target} does not exist: no module {parts[0]!r}.")


def fits(value: Any, hint: Any) -> bool:
    """Whether a config value may be passed where `hint` is annotated; unknown annotations accept anything."""
    if hint is Any:  # a class since Python 3.11
        return True
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, arg) for arg in args)
    if origin is typing.Literal:
        return value in args
    if origin in (list, tuple, Sequence):
        inner = args[0] if args else Any
        return isinstance(value, (list, tuple)) and all(fits(item, inner) for item in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (str, bool):
        return isinstance(value, hint)
    if hint is type(None):
        return value is None
    # Anything else (Tensor, Callable, ...) cannot be written in YAML, so plain values must match another member.
    return not (
        isinstance(hint, type) and isinstance(value, (int, float, str, bool, type(None))) and hint is not object
    )


def bind(key: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check arguments against the signature without calling.

    Raises:
        MantaError: an argument does not exist, is missing, or has the wrong type.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some C functions have none
        return
    parameters = signature.parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in kwargs:
        if name not in parameters and not takes_any:
            known = list(parameters)[len(args) :]
            hint = nearest(name, known)
            raise MantaError(
                f"{key}.{name} is not an argument of {function.__qualname__}."
                + (f" Did you mean {key}.{hint}?" if hint else f" It takes: {', '.join(known) or 'nothing'}.")
            )
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise MantaError(f"{key}: {function.__qualname__} {error}.") from error
    try:
        hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except Exception:  # annotations that cannot be evaluated say nothing
        return
    for name, value in kwargs.items():
        if name in hints and not fits(value, hints[name]):
            wanted = getattr(hints[name], "__name__", None) if isinstance(hints[name], type) else str(hints[name])
            raise MantaError(f"{key}.{name}={value!r} has the wrong type: {function.__qualname__} takes {wanted}.")


def build(key: str, spec: Mapping[str, Any], allowed: Sequence[str], *args: Any, **extra: Any) -> Any:
    """Build a plug-in from its config; `extra` fills arguments that the config leaves out or null.

    Raises:
        MantaError: as `check_allowed`, `locate` and `bind`, or when the constructor refuses its values.
    """
    check_allowed(key, spec, allowed)
    target, kwargs = split(spec)
    function = locate(key, target, allowed)
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some C functions have none
        parameters = types.MappingProxyType({})
    for name, value in extra.items():
        if name in parameters and kwargs.get(name) is None:
            kwargs[name] = value
    bind(key, function, args, kwargs)
    try:
        return function(*args, **kwargs)
    except MantaError:
        raise
    except Exception as error:  # whatever a constructor says of its values
        shown = ", ".join(f"{name}={value!r}" for name, value in kwargs.items() if name not in extra)
        raise MantaError(f"{key}: {target} refuses its arguments ({shown}): {error}") from error

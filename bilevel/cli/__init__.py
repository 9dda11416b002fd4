"""Command line: ``bilevel COMMAND``, or ``python -m bilevel COMMAND``; ``bilevel --version``.

Searches: ``search`` (activations, the main job), ``search-skips``, ``search-darts``,
``search-nasbench201``, ``search-own``. After a search: ``train RUN``. Others: ``certify``,
``baseline``, ``rank``.
``bilevel help COMMAND`` lists the flags of a command.
"""

import contextlib
import difflib
import io
import logging
import pkgutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from bilevel.cli.flags import commands, datasets, deep_searches, from_config_file, rules
from bilevel.cli.runtime import invocation
from bilevel.runs.interrupts import deferred_terminations, terminate

# Flags of each command, with the module and the class of its run. Modules are imported when
# they run, so that help and mistakes do not wait for JAX.
_COMMANDS: dict[str, tuple[type[commands.Job], str]] = {
    "search": (commands.Search, "search:_SearchRun"),
    "search-skips": (deep_searches.SkipSearch, "deep_search.corners:skip_run"),
    "search-darts": (deep_searches.DartsSearch, "deep_search.cells:_DartsRun"),
    "search-nasbench201": (deep_searches.NasBench201Search, "deep_search.cells:_NasBench201Run"),
    "search-own": (deep_searches.OwnSearch, "deep_search.corners:_OwnRun"),
    "train": (deep_searches.Train, "train:_TrainRun"),
    "certify": (commands.Certify, "certify:_CertifyRun"),
    "baseline": (commands.Baseline, "baseline:_BaselineRun"),
    "rank": (commands.Rank, "rank:_RankRun"),
}
Parsed = tuple[commands.Job, commands.Output]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in ``arguments``, by default the command line; return the exit status.

    A user error (a bad flag, a missing file) prints one message and returns 2. Ctrl-C prints a
    message about the saved part and returns 130; SIGTERM prints it and ends the process. A lost
    process of the run returns 1.
    """
    with deferred_terminations() as terminated:
        status = _exit_status(arguments)
    if terminated:
        terminate()
        return 128 + signal.SIGTERM  # the caller handles the signal and has returned
    return status


def _exit_status(arguments: Sequence[str] | None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if hasattr(sys.stdout, "reconfigure"):  # ASCII terminals cannot print λ
        sys.stdout.reconfigure(errors="replace")
    try:
        with invocation.heard():
            _run_command(arguments)
    except KeyboardInterrupt as stop:
        return _print_error(str(stop) or "interrupted before the run began", 130)
    except OSError as error:
        file = f"{error.filename}: " if error.filename else ""
        return _print_error(f"{file}{error.strerror}." if error.strerror else str(error), 2)
    except (ValueError, FloatingPointError) as error:
        return _print_error(str(error), 2)
    except RuntimeError as error:
        from bilevel.internal.processes import LostProcessError

        if not isinstance(error, LostProcessError):
            raise
        return _print_error(str(error), 1)
    return 0


def _print_error(message: str, status: int) -> int:
    print(f"bilevel: {' '.join(message.split())}", file=sys.stderr)
    return status


def _run_command(arguments: Sequence[str]) -> None:
    if "--version" in arguments and arguments[0] in ("--version", *_COMMANDS):
        versions = "bilevel {bilevel}, jax {jax}, jaxlib {jaxlib}, Python {python}"
        print(versions.format(**invocation.versions()))
    elif (parsed := parse_flags(arguments)) is None:
        import jax

        devices = ", ".join(map(str, jax.devices()))
        print(f"bilevel {invocation.versions()['bilevel']}, jax {jax.__version__} on {devices}")
    else:
        config, output = parsed
        config.check()
        distributed = getattr(config, "distributed", False)
        # Otherwise only the first process has the folder, or sizes depend on the data.
        if not (distributed or datasets.is_own(config.data)):
            from_config_file.check_directory(config)
        # All checks that do not need JAX are done here.
        invocation.switch_autotuning_off(arguments[0])
        if output.cache:
            invocation.keep_programs()
        if distributed:
            from bilevel.cli.runtime.devices import join

            join()
        run = pkgutil.resolve_name(f"bilevel.cli.{_COMMANDS[arguments[0]][1]}")
        with _silent_downloads() if output.quiet else contextlib.nullcontext():
            run(config, output, arguments).run()


@contextlib.contextmanager
def _silent_downloads() -> Iterator[None]:
    """Silence the logger of pooch, which prints every download, except for warnings."""
    import pooch

    # A filter, because this logger is not registered: setLevel would not clear its cached levels.
    def warns(record):
        return record.levelno >= logging.WARNING

    logger = pooch.get_logger()
    logger.addFilter(warns)
    try:
        yield
    finally:
        logger.removeFilter(warns)


def parse_flags(arguments: Sequence[str]) -> Parsed | None:
    """Return the unchecked flags of the command in ``arguments``; None for ``version``.

    The command line has priority over the sizes of ``--quick``, then ``--config``, then defaults.
    """
    arguments = _in_full(arguments)
    defaults = {name: kind() for name, (kind, _) in _COMMANDS.items()}
    parsed = _parsed(arguments, defaults)
    if parsed is None:
        return None
    config, output = parsed
    if not (output.quick or output.config):
        return parsed
    # Parse again: these two flags set the defaults of the others.
    kind = type(config)
    start = from_config_file.values(output.config, kind) if output.config else {}
    start |= kind.quick if output.quick else {}
    return _parsed(arguments, defaults | {arguments[0]: kind(**start)})


def _in_full(arguments: Sequence[str]) -> list[str]:
    """Return the line as the parser takes it: ``train --run RUN``, ``--progress False``, help.

    An unknown command or flag raises an error with the nearest one.
    """
    line = list(arguments) or ["--help"]
    if line[0] == "help":
        line = [*(word for word in line[1:] if word != "help"), "--help"]
    if line[0] in ("-h", "--help", "version"):
        return line
    if line[0] not in _COMMANDS:
        names = [*_COMMANDS, "version", "help"]
        raise ValueError(
            f"command: expected one of {', '.join(names)}, got {rules.shown(line[0])}"
            f"{_nearest(line[0], [*names, '--version', '--help'])}; see bilevel --help."
        )
    if line[0] == "train" and len(line) > 1 and not line[1].startswith("-"):
        line.insert(1, "--run")
    known = _flags(_COMMANDS[line[0]][0])
    full = line[:1]
    for word, following in zip(line[1:], [*line[2:], "--"], strict=False):
        name = word.partition("=")[0].replace("_", "-")
        if word.startswith("--") and name not in known:
            raise ValueError(
                f"flag: expected a flag of bilevel {line[0]}, got {rules.shown(word)}"
                f"{_nearest(name, known)}; see bilevel {line[0]} --help."
            )
        if word == "--no-progress" or (word == "--progress" and following.startswith("-")):
            full += ["--progress", str(word == "--progress")]
        else:
            full.append(word)
    return full


def _flags(kind: type[commands.Job]) -> list[str]:
    """Return every flag of a command, with its hyphens."""
    hints = rules.hints(kind) | rules.hints(commands.Output)
    switches = [name for name, hint in hints.items() if hint is bool]
    words = [*hints, *(f"no-{name}" for name in (*switches, "progress")), "help"]
    return [f"--{word.replace('_', '-')}" for word in words]


def _nearest(name: str, names: Iterable[str]) -> str:
    """Return a question that offers the nearest of the ``names``, if one is near."""
    near = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _parsed(arguments: Sequence[str], defaults: dict[str, commands.Job]) -> Parsed | None:
    import tyro

    app = tyro.extras.SubcommandApp()
    for name, config in defaults.items():
        app.command(name=name)(_command(config))

    @app.command(name="version")
    def version() -> None:
        """Print the version and those of JAX and its devices."""

    with contextlib.redirect_stderr(io.StringIO()) as box:
        try:
            return app.cli(args=arguments, prog="bilevel", description=__doc__)
        except SystemExit as end:
            if end.code:
                raise ValueError(_read_error_box(box.getvalue())) from None
            raise


def _command(defaults: commands.Job) -> Callable[..., Parsed]:
    """Return the function that defines the flags of a command for tyro."""
    import tyro

    def command(run, output):
        return run, output

    command.__doc__ = type(defaults).__doc__
    command.__defaults__ = (defaults, commands.Output())
    command.__annotations__ = {
        "run": tyro.conf.OmitArgPrefixes[type(defaults)],  # type: ignore[misc]
        "output": tyro.conf.OmitArgPrefixes[commands.Output],
        "return": tuple,
    }
    return command


def _read_error_box(box: str) -> str:
    """Return the message between a title and help in the box that tyro draws, also in ASCII."""
    _, *lines = [line.strip("│ \n") for line in box.splitlines()]
    rules = [set(line) <= set("╭╮╰╯─- ") for line in lines]
    start = rules.index(False)
    end = next((i for i, rule in enumerate(rules) if rule and i > start), len(lines))
    message = " ".join(lines[start:end]).rstrip(".")
    return f"{message}; see --help."

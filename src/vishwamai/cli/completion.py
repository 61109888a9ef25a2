"""Prints a script that completes commands, options and their choices in bash, zsh or fish.

vishwamai completion bash > ~/.local/share/bash-completion/completions/vishwamai
vishwamai completion zsh > ~/.zfunc/_vishwamai
vishwamai completion fish > ~/.config/fish/completions/vishwamai.fish
"""

from __future__ import annotations

import argparse
import shlex

SHELLS = ("bash", "zsh", "fish")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def run(arguments: argparse.Namespace) -> int:
    from vishwamai.cli import COMMANDS, command_parser

    options = {name: _options(command_parser(name)) for name in COMMANDS}
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[arguments.shell](options), end="")
    return 0


def _options(parser: argparse.ArgumentParser) -> dict[str, tuple[str, ...]]:
    """The choices of each option of a command; the choices of its first argument have no name."""
    table: dict[str, tuple[str, ...]] = {}
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        choices = tuple(map(str, action.choices or ()))
        for option in [name for name in action.option_strings if name.startswith("--")]:
            table[option] = choices
        if not action.option_strings and choices:
            table[""] = choices
    return table


def _bash(options: dict[str, dict[str, tuple[str, ...]]]) -> str:
    """After an option with choices, those; after "-", the command's options; else files."""
    words, values = [], []
    for command, table in options.items():
        names = " ".join([*filter(None, table), *table.get("", ())])
        words.append(f"    {command}) words={shlex.quote(names)} ;;")
        values += [
            f"    {command}:{option}) words={shlex.quote(' '.join(choices))} ;;"
            for option, choices in table.items()
            if option and choices
        ]
    return f"""\
# Completion of vishwamai for bash.
_vishwamai() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
  local command="${{COMP_WORDS[1]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W {shlex.quote(" ".join(options))} -- "$current"))
    return
  fi
  case "$command:$previous" in
{chr(10).join(values)}
  esac
  if [ -n "$words" ]; then
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    return
  fi
  case "$command" in
{chr(10).join(words)}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o bashdefault -o default -F _vishwamai vishwamai
"""


def _zsh(options: dict[str, dict[str, tuple[str, ...]]]) -> str:
    return f"#compdef vishwamai\nautoload -U +X bashcompinit && bashcompinit\n{_bash(options)}"


def _fish(options: dict[str, dict[str, tuple[str, ...]]]) -> str:
    from vishwamai.cli import COMMANDS

    lines = ["# Completion of vishwamai for fish."]
    for command, table in options.items():
        lines.append(f"complete -c vishwamai -n __fish_use_subcommand -a {command} -d {shlex.quote(COMMANDS[command])}")
        for option, choices in table.items():
            name = f" -l {option.removeprefix('--')}" if option else " -f"
            values = f" -x -a {shlex.quote(' '.join(choices))}" if choices else ""
            lines.append(f"complete -c vishwamai -n '__fish_seen_subcommand_from {command}'{name}{values}")
    return "\n".join(lines) + "\n"

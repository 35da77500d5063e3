"""`recorders completion`: what lets a shell complete verbs and options, without starting Python at each key."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping

Words = Mapping[str, Mapping[str, str]]
"""By verb, "" for none: each word that may come, and what it is."""

_BASH = """_recorders() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} verb=${{COMP_WORDS[1]}} words=
    [ "$COMP_CWORD" -eq 1 ] && verb=
    case "$verb" in
{cases}
    esac
    case "$cur" in
        -*) COMPREPLY=( $(compgen -W "$words" -- "$cur") ) ;;
        *) COMPREPLY=( $(compgen -W "$(printf '%s\\n' $words | grep -v '^-')" -- "$cur") ) ;;
    esac
}}
complete -o default -F _recorders recorders
"""
_ZSH = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"


def add_arguments(parser: ArgumentParser) -> None:
    """Adds what `run` takes."""
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help="the shell")


def run(shell: str, words: Words, as_json: bool = False) -> None:
    """Print what a shell must read to complete verbs and options: eval "$(recorders completion bash)"."""
    if shell == "fish":
        print("\n".join(_fish(words)))
        return
    cases = "\n".join(f"        '{verb}') words='{' '.join(found)}' ;;" for verb, found in words.items())
    print(_ZSH * (shell == "zsh") + _BASH.format(cases=cases), end="")


def _fish(words: Words) -> list[str]:
    lines = []
    for verb, found in words.items():
        when = f"__fish_seen_subcommand_from {verb}" if verb else f"not __fish_seen_subcommand_from {' '.join(words)}"
        for word, about in found.items():
            kind = f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}" if word.startswith("-") else f"-a {word}"
            quoted = about.replace("\\", "\\\\").replace("'", "\\'")
            lines.append(f"complete -c recorders -n '{when}' {kind} -d '{quoted}'")
    return lines

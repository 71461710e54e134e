"""The verb that prints a shell's completions: completion.  They are made from the tables of verbs and options, and shipped as files."""

from __future__ import annotations

from leased.client.shell import EXIT_YES, Arguments, Option, Output, Usage, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

SHELLS: Final = {"bash": "bash", "zsh": "zsh", "fish": "fish"}
"""Each with the ending of its files in completions/."""

COMMANDS: Final = ("lease", "leased")


def completion(arguments: Arguments, out: Output) -> int:
    (shell,) = arguments.operands
    if shell not in SHELLS:
        raise Usage(f"there are completions for {', '.join(SHELLS)}, not for {shell!r}")
    out.line(script(shell, arguments.text("--for") or "lease"))
    return EXIT_YES


def script(shell: str, command: str) -> str:
    from importlib.resources import files

    return (files("leased.client") / "completions" / f"{command}.{SHELLS[shell]}").read_text(encoding="utf-8").rstrip("\n")


VERBS: Final = {
    "completion": Verb(
        completion,
        "lease completion SHELL [--for COMMAND]",
        "Prints the completions of verbs and options for SHELL: bash, zsh or fish.  Nothing of the daemon's is completed: no keys, no fences.\n"
        'bash: eval "$(lease completion bash)" in ~/.bashrc, or into ~/.local/share/bash-completion/completions/lease\n'
        "zsh:  lease completion zsh > ~/.zfunc/_lease, with ~/.zfunc in fpath before compinit; or eval it after compinit\n"
        "fish: lease completion fish > ~/.config/fish/completions/lease.fish",
        (Option("--for", "COMMAND", "of which command (default lease)", COMMANDS),),
        (1, 1),
        ('eval "$(lease completion bash)"', "lease completion fish --for leased > ~/.config/fish/completions/leased.fish"),
    ),
}

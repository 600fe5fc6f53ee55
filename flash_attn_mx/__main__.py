"""python -m flash_attn_mx COMMAND: each command is a module with main(argv), imported when asked for."""

import importlib
import importlib.util
import sys
from typing import Optional

COMMANDS = {
    "info": "versions, devices, usable backends, what was built",
    "support": "the support matrix, found by trying",
    "demo": "MXFP8 attention in a real encoder, in training, and against other formats",
    "validate": "what MXFP8 attention does to a model: figures, a report, a policy file",
    "study": "compare block sizes, roundings, P schemes and outlier treatments",
}


def usage() -> str:
    rows = "\n".join(f"  {name:9} {meaning}" for name, meaning in COMMANDS.items() if _exists(name))
    return f"usage: python -m flash_attn_mx COMMAND [options]\n\ncommands:\n{rows}"


def _exists(command: str) -> bool:
    return importlib.util.find_spec(f"{__package__}.{command}") is not None


def main(argv: Optional[list[str]] = None) -> int:
    """Runs one command; 2 for a command that is not there, or whose dependencies are not."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    command, rest = argv[0], argv[1:]
    if command not in COMMANDS or not _exists(command):
        print(f"flash_attn_mx: no command {command!r}\n{usage()}", file=sys.stderr)
        return 2
    try:
        module = importlib.import_module(f"{__package__}.{command}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(__package__):
            raise  # a fault of this package, not of the installation
        hint = "pip install 'flash_attn_mx[demo]'"
        print(f"flash_attn_mx {command} needs the package {error.name}: {hint}", file=sys.stderr)
        return 2
    return module.main(rest) or 0


if __name__ == "__main__":
    sys.exit(main())

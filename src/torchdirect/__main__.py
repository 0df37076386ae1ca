"""``python -m torchdirect`` is the command ``torchdirect``."""

from torchdirect.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())

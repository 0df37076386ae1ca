"""The command line, which uses only the public API; needs ``pip install torchdirect[cli]``."""

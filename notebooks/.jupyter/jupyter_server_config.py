"""JupyterLab as `make lab` starts it: a notebook that is saved without an edit changes no tracked file."""

from lab.write import pairing

c = get_config()  # noqa: F821 - Jupyter gives it to its configuration files
c.FileContentsManager.pre_save_hook = pairing.saved

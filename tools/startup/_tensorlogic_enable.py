"""Where TENSORLOGIC_ENABLE is set: import tensorlogic, which then enables itself, as soon as the program has imported torch.

Installed beside the package with tensorlogic_enable.pth; a program that never imports torch pays for this module alone.
"""

import sys
from importlib.util import find_spec


class _AfterTorch:
    """Finds torch like everybody else, and lets one thing more happen at the end of its import."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)
            return spec
        run = spec.loader.exec_module

        def exec_module(module):
            try:
                run(module)
            except BaseException:
                sys.meta_path.insert(0, self)  # the program may try again
                raise
            finally:
                del spec.loader.exec_module
            _enable()

        spec.loader.exec_module = exec_module
        return spec


def _enable():
    try:
        import tensorlogic  # noqa: F401  reads the variable itself
    except (
        Exception
    ) as problem:  # the program did not ask for us: it runs as it would without, and is told
        import warnings

        warnings.warn(
            f"TENSORLOGIC_ENABLE is set, but tensorlogic could not be enabled: {type(problem).__name__}: {problem}",
            stacklevel=2,
        )


sys.meta_path.insert(0, _AfterTorch())

"""Says what to install when there is no torch; imported before all that imports it.

The distribution does without torch, for machines that only run the daemon.
"""

import importlib.util

if importlib.util.find_spec("torch") is None:
    raise ModuleNotFoundError(
        "disco_client needs torch, and this Python has none; install it with "
        "pip install 'discod[torch]' (the daemon alone runs without)",
        name="torch",
    )

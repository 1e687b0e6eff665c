"""`tensorlogic try`: an unmodified program with and without us, in turn, and whether it gains.

A program runs in fresh processes (`child.py`): once watched (`look.py`), once tuned, then plainly and with help
(`assist.py`) in turn, as `runs.py` says; `advice.py` names what else could be gained, `screen.py` shows it all.
"""

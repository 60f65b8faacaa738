"""The rules, one a file. Which of them run, and in which order, is said in `passes/normalise.py` and `passes/recognise.py`."""

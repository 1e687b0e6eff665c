"""The benchmark: what is measured, how, the result file, and what is read out of it.

From Python: `tensorlogic.bench.session.bench(quick=True, json="result.json")`; on a terminal: `tensorlogic bench`.
"""

"""The certificate: does a parallel run compute what one process would? Any launch file of Accelerate, in float64.

`certify.py` is the way through it: a small model of the same type (`shrinking.py`), what the launch file says
(`launch_plan.py`), the same training on one process and under the file (`worker.py`), the comparison (`compare.py`),
the cause of a difference (`explain.py`: steps computed again, `steps.py`, and averages that are tried,
`hypotheses.py`), and the verdict (`report.py`). With --dtype the ranks compute in the run's own dtype and are compared
with float64 (`own_dtype.py`), within what rounding may do (`rounding.py`).
"""

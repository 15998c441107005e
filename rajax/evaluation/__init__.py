"""Accuracy on long-context benchmarks, dense attention beside retrieval.

sample.py         what a task is, and how its prompt is made to fit a length
ruler.py          RULER's 13 tasks
infinitebench.py  ∞-Bench's synthetic tasks, and its files
score.py          metrics, and the interval of a difference
run.py            the loop over samples, which can be interrupted and resumed
report.py         tables, summary.json and a page with pictures
perplexity.py     perplexity by context position
lm_eval.py        a RAJAX checkpoint as a model of lm-evaluation-harness
"""

"""The scheduling of a router's requests: which worker each one gets, and where it waits until then.

scheduler.py           the tasks of requests that wait; their queue is `RouterQueue`
remaining_work.py      the rest of a request
model_availability.py  models without workers
"""

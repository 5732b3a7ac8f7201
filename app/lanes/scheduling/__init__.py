"""The scheduling of a router's requests: which worker each one gets, and where it waits until then.

scheduler.py           the tasks of interactive requests; their queue is `RouterQueue`
batch_scheduler.py     workers for batch requests, and preemption
waiting_tasks.py       the tasks of requests that wait in a queue or in the log
remaining_work.py      the rest of a request
model_availability.py  models without workers
"""

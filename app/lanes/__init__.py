"""The lanes of a router: dispatch, failover and termination of the requests in them.

owner.py               all requests of one lane: which job is next
dispatch.py            wait for a worker, write decision and assignment
failover.py            move a request to another worker
termination.py         end a request
scheduler.py           the requests that wait for a worker, and their order
cancellable_waits.py   waits that a Cancel ends
request_timers.py      when a request is looked at again
worker_capacity.py     workers that take no more runs
deferred_prompts.py    prompts from Kafka that wait in the log
model_availability.py  models without workers
shared_scan.py         shared scans of the log: requests, and what readers have seen
failure_detector.py    the failure detector of workers
capacity_reports.py    reports of free capacity to preprocessors
context.py             the state that all of these share
"""

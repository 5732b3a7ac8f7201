"""The lanes of a router: dispatch, failover and termination of the requests in them.

owner.py               all requests of one lane: which job is next
dispatch.py            wait for a worker, write decision and assignment
failover.py            move a request to another worker
termination.py         end a request
scheduler.py           workers for interactive requests, and the order of those that wait
batch_scheduler.py     workers for batch requests, and preemption
waiting_requests.py    the queue of each of the two, and what is left of a request
handovers.py           the hand-overs from prefill to decode
worker_capacity.py     workers that take no more runs
deferred_prompts.py    prompts from Kafka that wait in the log
model_availability.py  models without workers
shared_reads.py        shared reads of the log: requests, emitted tokens, end offsets
failure_detector.py    the failure detector of workers
capacity_reports.py    reports of free capacity to preprocessors
context.py             the state that all of these share
"""

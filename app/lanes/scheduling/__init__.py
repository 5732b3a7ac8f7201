"""The scheduling of a router's requests: which worker each one gets, and where it waits until then.

scheduler.py           workers for interactive requests, and the order of those that wait
batch_scheduler.py     workers for batch requests, and preemption
waiting_requests.py    the queue of each of the two, and the rest of a request
deferred_prompts.py    prompts from Kafka that wait in the log
worker_capacity.py     workers that take no more runs
model_availability.py  models without workers
"""

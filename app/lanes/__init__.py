"""The lanes of a router: dispatch, failover and termination of the requests in them.

owner.py               all requests of one lane: which job is next
dispatch.py            write decision and assignment for a worker with room
admission.py           wait for such a worker; or refuse, or defer a request
scheduler.py           the tasks of requests that wait in the router's queue
remaining_work.py      the rest of a request, and whether it can be continued
failover.py            move a request to another worker
termination.py         end a request
lane_backpressure.py   pause a lane whose topics take no appends
handovers.py           the hand-overs from prefill to decode
shared_reads.py        shared reads of the log: requests, emitted tokens, end offsets
failure_detector.py    the failure detector of workers
periodic_records.py    records of free capacity for preprocessors, and of ended prompts
context.py             the state that all of these share
"""

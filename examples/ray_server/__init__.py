"""The example server on Ray Serve: the same workers and front, in replicas that Serve places and replaces.

    python3 dev.py ray                       a cluster of three nodes on this machine, and the service on it
    serve deploy examples/ray_server/service.yaml

It shows kvflow in replicas that Serve starts, scales and kills: a decode replica owns the hand-over, and its load goes
on with another prefill replica if one dies; a router that knows free blocks and prefixes; replicas that drain before
they end.

Reading order:

    prefill      a deployment that computes prompts and offers their blocks
    decode       a deployment that loads blocks and answers; it asks a prefill replica, and another if that fails
    ingress      the OpenAI-compatible front; it asks a decode replica
    replica      the parts of every replica: engine, kvflow runtime, background tasks
    messages     messages between replicas, in addition to openai_server's
    errors       translates Ray's errors, and the early end of a replica's stream, into failures
    routing      chooses the replica for a request, by free blocks and by prefix; `ranking` has the rule, without Ray
    application  the three deployments as one application, for service.yaml
    cluster      a local cluster with an address for each node
    command      the command line
"""

"""The example server on Ray Serve: the same workers and front, in replicas that Serve places and replaces.

    python3 dev.py ray                       a cluster of three nodes on this machine, and the service on it
    serve deploy examples/ray_server/service.yaml

Reading order:

    prefill      a deployment that computes prompts and offers their blocks
    decode       a deployment that loads blocks and answers; it asks a prefill replica, and another one if that fails
    ingress      the OpenAI-compatible front; it asks a decode replica
    replica      what both kinds of replicas open: engine, kvflow runtime, background tasks
    messages     what they say to each other, beside openai_server's own
    losses       the end of what a replica says, and Ray's errors, as failures
    routing      which replica gets a request: by free blocks and by prefix; `room` is its rule, without Ray
    application  the three as one application, which service.yaml names
    cluster      a local cluster whose nodes have addresses of their own
    command      the command line
"""

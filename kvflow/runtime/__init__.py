"""The asyncio shell around `kvflow.core` and `kvflow.transport`. Start reading at `runtime.Runtime`."""

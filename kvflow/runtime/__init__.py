"""The asyncio shell around core and transport. Start reading at `runtime.Runtime`."""

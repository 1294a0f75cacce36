"""The only place that knows ``nn.Module`` types: every layer becomes one canonical form here.

Importing this package registers all rules; to add a layer kind, add a file with a rule and import it below.
"""

from ifcomp.layers import attention, conv, embedding, linear, norm  # noqa: F401  (they register their rules)

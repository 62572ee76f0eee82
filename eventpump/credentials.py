"""What `credential` takes: keys, signatures, and the protocols of Azure's credentials."""

from typing import TYPE_CHECKING

from eventpump import homes

if TYPE_CHECKING:
    from eventpump.options.credentials import AccessToken as AccessToken
    from eventpump.options.credentials import Credential as Credential
    from eventpump.options.credentials import NamedKey as NamedKey
    from eventpump.options.credentials import NamedKeyCredential as NamedKeyCredential
    from eventpump.options.credentials import SasCredential as SasCredential
    from eventpump.options.credentials import SharedKey as SharedKey
    from eventpump.options.credentials import SharedSignature as SharedSignature
    from eventpump.options.credentials import TokenCredential as TokenCredential
else:  # to checkers it would mean that every name exists
    __all__, __getattr__, __dir__ = homes.public(
        __name__,
        {
            "options.credentials": (
                "AccessToken Credential NamedKey NamedKeyCredential SasCredential SharedKey SharedSignature "
                "TokenCredential"
            ),
        },
    )

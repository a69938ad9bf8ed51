"""Message classes and methods of the worker protocol, made at import from the descriptors shipped as protocol.desc.

Descriptors instead of generated code: they load under every protobuf runtime, generated code only under its own.
Every message of lrmoe/v1/worker.proto and common.proto is an attribute of this module, as is every enum value.
"""

import pkgutil
from typing import Dict, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

VERSION = 1


class Method(NamedTuple):
    path: str
    request: type
    response: type
    server_streaming: bool


def _read_descriptors():
    try:
        serialized = pkgutil.get_data(__package__, "protocol.desc")
    except FileNotFoundError:
        raise ImportError(
            "lrmoe/protocol.desc is missing: install the package (pip install tools/python) or import the copy that "
            "the CMake build stages in build/<preset>/python") from None
    return descriptor_pb2.FileDescriptorSet.FromString(serialized)


def _message_class(descriptor):
    if hasattr(message_factory, "GetMessageClass"):  # protobuf >= 4.22
        return message_factory.GetMessageClass(descriptor)
    return _factory.GetPrototype(descriptor)


_pool = descriptor_pool.DescriptorPool()
_factory = None if hasattr(message_factory, "GetMessageClass") else message_factory.MessageFactory(_pool)
METHODS: Dict[str, Method] = {}


def _define(namespace):
    files = _read_descriptors().file
    for file in files:
        _pool.AddSerializedFile(file.SerializeToString())
    for file in files:
        descriptor = _pool.FindFileByName(file.name)
        for name, message in descriptor.message_types_by_name.items():
            namespace[name] = _message_class(message)
        for enum in descriptor.enum_types_by_name.values():
            namespace.update((value.name, value.number) for value in enum.values)
        for service in file.service:
            for method in service.method:
                METHODS[method.name] = Method(
                    f"/{file.package}.{service.name}/{method.name}",
                    _message_class(_pool.FindMessageTypeByName(method.input_type.lstrip("."))),
                    _message_class(_pool.FindMessageTypeByName(method.output_type.lstrip("."))),
                    method.server_streaming)


_define(globals())

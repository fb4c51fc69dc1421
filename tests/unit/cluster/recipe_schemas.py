"""What the schemas of KubeRay and SkyPilot say about the fields that our recipes use, and about no other field.

`RAYJOB` follows the openAPI schema of the CRD `rayjobs.ray.io`, version `ray.io/v1`, of KubeRay 1.5, with the parts of
Kubernetes' pod template in it. `SKYPILOT` follows `get_task_schema` and `get_resources_schema` of SkyPilot 0.14. Both
are written down here by hand: the CRD has a megabyte. A field that they do not name is refused, so a new field of a
recipe must be looked up in its schema and added here.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "format": "int32", "minimum": 0, "maximum": 2**31 - 1}
FLAG: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
QUANTITY: Schema = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "pattern": r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?[0-9]+))?$",
}
DNS_NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 47}
"""KubeRay refuses longer names of a RayJob: it makes other names of them."""


def structure(required: str = "", **fields: Schema) -> Schema:
    return {"type": "object", "required": required.split(), "properties": fields, "additionalProperties": False}


def several(item: Schema) -> Schema:
    return {"type": "array", "items": item}


CONTAINER = structure(
    "name",
    name=DNS_NAME,
    image=TEXT,
    envFrom=several(structure(secretRef=structure(name=TEXT, optional=FLAG))),
    resources=structure(limits={"type": "object", "additionalProperties": QUANTITY}),
    volumeMounts=several(structure("name mountPath", name=TEXT, mountPath=TEXT)),
)
VOLUME = structure(
    "name",
    name=DNS_NAME,
    persistentVolumeClaim=structure("claimName", claimName=TEXT),
    emptyDir=structure(medium=TEXT),
)
TEMPLATE = structure(spec=structure("containers", containers=several(CONTAINER), volumes=several(VOLUME)))
RAYJOB = structure(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=structure("name", name=DNS_NAME),
    spec=structure(
        backoffLimit=COUNT,
        activeDeadlineSeconds=COUNT,
        shutdownAfterJobFinishes=FLAG,
        entrypoint=TEXT,
        rayClusterSpec=structure(
            "headGroupSpec",
            authOptions=structure(mode={"enum": ["disabled", "token"]}),
            headGroupSpec=structure("template", rayStartParams=TEXTS, template=TEMPLATE),
            workerGroupSpecs=several(
                structure(
                    "groupName maxReplicas minReplicas template",
                    groupName=TEXT,
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                    rayStartParams=TEXTS,
                    template=TEMPLATE,
                )
            ),
        ),
    ),
)

SKYPILOT = structure(
    name=TEXT,
    num_nodes={"type": "integer", "minimum": 1},
    workdir=TEXT,
    resources=structure(image_id=TEXT, accelerators=TEXT, cpus={"type": ["string", "number"]}),
    run=TEXT,
)

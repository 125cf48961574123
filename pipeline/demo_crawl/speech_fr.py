"""French sentences for the demo crawl."""

from pipeline.demo_crawl.speech import Speech

FRENCH = Speech(
    language="fr",
    menu=("Accueil", "Articles", "Agenda", "À propos", "Contact"),
    titles=("{chose} : un reportage", "Tout savoir sur {sujet}", "Une journée {lieu}", "{sujet}, hier et aujourd'hui"),
    templates=(
        "{jadis}, {personne} a trouvé {objet} {lieu}.",
        "{personne} a vendu {objet} {jadis}.",
        "{souvent}, {personne} lit le journal {lieu}.",
        "{chose} était {etat} {jadis}.",
        "{personne} cherchait {objet} {lieu} {quand}.",
        "Personne ne savait pourquoi {personne} gardait {objet}.",
        "{souvent}, {chose} est {etat}.",
        "Pour {nombre} euros, on achète {objet} {lieu}.",
        "On raconte que {personne} a perdu {objet} {jadis}.",
        "{quand}, {personne} attendait {lieu}.",
        "Il faut demander à {personne} si {chose} est {etat}.",
        "Ensuite, {personne} a rapporté {objet} à la maison.",
        "Peut-être que {personne} trouvera {objet} {lieu}.",
        "Il a fallu {nombre} heures pour que {personne} retrouve {objet}.",
        "Depuis {nombre} ans, {personne} vient {lieu} avec {objet}.",
        "Malheureusement, {chose} était {etat} {jadis}.",
        "Avec {nombre} amis, {personne} a visité une exposition sur {sujet}.",
        "{personne} parle volontiers de {nombre} livres sur {sujet}.",
        "Quand {chose} est {etat}, {personne} reste à la maison.",
        "Selon {personne}, {chose} semble {etat}.",
        "Une conférence sur {sujet} a eu lieu {jadis} {lieu}.",
        "À peine {personne} avait pris {objet} que la pluie tombait.",
        "{souvent}, {personne} ouvre la fenêtre pour écouter les oiseaux.",
        "Malgré tout, {personne} a gardé {objet} pendant {nombre} jours.",
        "Ceux qui aiment {sujet} se retrouvent {souvent} {lieu}.",
        "Une affiche sur {sujet} est restée {nombre} semaines {lieu}.",
        "Par chance, {personne} avait {objet} {quand}.",
        "À la fin, tout le monde souriait, car {chose} était {etat}.",
        "{personne} a montré {objet} aux enfants {lieu}.",
        "Autrefois il y avait {nombre} boutiques {lieu}.",
        "Le journal a publié {jadis} un article sur {sujet}.",
        "{quand}, {personne} a enfin trouvé {objet}.",
        "Seul le facteur pensait que {chose} restait {etat}.",
        "Après {nombre} minutes, {personne} cherchait encore {objet}.",
        "{jadis}, {personne} a salué un vieil ami {lieu}.",
        "La conversation portait {jadis} sur {sujet}.",
        "Sans {objet}, {personne} ne quitte jamais la maison.",
        "{souvent}, on voit {personne} {lieu} avec {objet}.",
        "Rien ne change {lieu}, et {chose} demeure {etat}.",
        "Nous avons lu {nombre} pages sur {sujet} {quand}.",
    ),
    phrases={
        "jadis": (
            "hier soir / il y a trois semaines / pendant l'été dernier / vendredi dernier / un matin de brouillard / "
            "peu avant Noël / vers minuit / après l'orage / il y a bien des années / le jour de la rentrée"
        ),
        "souvent": (
            "chaque matin / le dimanche / en automne / le soir / par beau temps / de temps en temps / d'habitude / "
            "les jours de fête / en hiver / après le travail"
        ),
        "personne": (
            "la boulangère du village / ma grand-mère / un vieux pêcheur / la jeune institutrice / notre voisin / "
            "une jardinière / le contrôleur du train / un étudiant de Lyon / la mairesse / mon frère / l'horloger / "
            "une voyageuse venue de Genève / la bibliothécaire / le meunier / un facteur aimable"
        ),
        "objet": (
            "un panier de pommes / le vieux vélo / une théière en porcelaine / la clé de la cave / "
            "une longue lettre / la carte de la région / du pain frais / un livre sur les oiseaux / "
            "une boîte de photos / des gants chauds / le journal de la veille / un bouquet de tulipes / "
            "la recette de la tarte aux prunes / une lampe neuve / un parapluie vert"
        ),
        "lieu": (
            "sur la place du marché / derrière l'église / au bord du lac / dans le petit atelier / "
            "devant la mairie / dans le jardin du musée / près du vieux moulin / à l'arrêt du tramway / "
            "sur le pont / dans une ruelle tranquille / sous les tilleuls / en haut de la colline / au port / "
            "dans la cuisine"
        ),
        "quand": (
            "pendant que la pluie tombait / avant l'arrivée des invités / après le départ du train / "
            "au moment où le soleil revenait / alors que la route était barrée / tandis que les cloches sonnaient / "
            "malgré le froid de février / au milieu de la fête / pendant la panne de courant"
        ),
        "etat": (
            "presque vide / difficile à trouver / en bon état / très agréable / assez étrange / à peine visible / "
            "plus calme que prévu / célèbre dans la région / hors de prix / sans intérêt"
        ),
        "chose": (
            "le vieux pont / l'horaire des trains / le petit café / l'exposition / le chemin du lac / "
            "l'eau de la fontaine / la soupe du jour / la vue depuis la tour / le concert du parc / l'atelier"
        ),
        "sujet": (
            "l'histoire de la ville / les plantes rares / la vie des abeilles / les cartes anciennes / "
            "l'art de la cuisine / la fabrication des violons / les pays lointains / les étoiles d'hiver / "
            "la navigation sur le fleuve / les romans policiers"
        ),
        "nombre": "deux / trois / quatre / cinq / sept / huit / dix / douze / vingt",
    },
)
